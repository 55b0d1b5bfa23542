"""What the actions of `vlm-server service` do."""

from __future__ import annotations

import argparse
import subprocess
import sys

from vlm_server.cli import exit_codes, options
from vlm_server.cli.client.daemon import url_of
from vlm_server.cli.exit_codes import CommandFailed
from vlm_server.cli.serve import listener
from vlm_server.cli.serve.listener import is_at
from vlm_server.cli.service import transaction
from vlm_server.cli.service.manager import Files, ServiceCommand, ServiceManager
from vlm_server.cli.service.program import installed_program
from vlm_server.cli.service.status import show, wait_for_answer
from vlm_server.errors import ConfigError, VlmServerError
from vlm_server.settings import Server, Settings

_LAST_LINES = 20
"""Of the log, where something failed."""


def install(arguments: argparse.Namespace, manager: ServiceManager) -> int:
    """Install the service, or leave all as it was.

    Raises ConfigError, ModelLoadError or CommandFailed.
    """
    settings = options.load_settings(arguments)
    options.check_memory_limit(settings)
    command = ServiceCommand(
        program=installed_program(),
        arguments=["serve", *options.settings_arguments(arguments), "--reload"],
        host=_host(settings.server),
        port=settings.server.port,
        drain_seconds=settings.server.drain_seconds,
    )
    new = manager.render(command)
    if arguments.dry_run:
        for path, content in new.items():
            print(f"# {path}\n{content.decode()}")
        return 0
    with transaction.locked(manager):
        _check_address(manager, settings.server)
        with transaction.undone_if_it_fails(manager):
            _install(manager, new)
            print(f"Installed {manager.path}", flush=True)
            _wait(arguments, manager, settings)
    return 0


def start(arguments: argparse.Namespace, manager: ServiceManager) -> int:
    """Start the service. Raises ConfigError or CommandFailed."""
    with transaction.locked(manager):
        settings = _settings_of(manager)
        manager.start()
        _wait(arguments, manager, settings)
    return 0


def restart(arguments: argparse.Namespace, manager: ServiceManager) -> int:
    """Start the service again, unless its settings are wrong. Raises ConfigError or
    CommandFailed.
    """
    with transaction.locked(manager):
        settings = _settings_of(manager)
        manager.restart()
        _wait(arguments, manager, settings)
    return 0


def stop(_: argparse.Namespace, manager: ServiceManager) -> int:
    """Finish running answers, and stop. Raises CommandFailed."""
    with transaction.locked(manager):
        _check_installed(manager)
        manager.stop()
    print("Stopped.")
    return 0


def uninstall(_: argparse.Namespace, manager: ServiceManager) -> int:
    """Stop the service and remove its files; does nothing if it is not installed."""
    with transaction.locked(manager):
        was_installed = manager.path.exists()
        transaction.remove(manager)
    print(f"Removed {manager.path}" if was_installed else "The service was not installed.")
    return 0


def status(arguments: argparse.Namespace, manager: ServiceManager) -> int:
    """Print the service's state. Returns an exit code of `status.py`."""
    if not manager.path.exists():
        print("not installed")
        return exit_codes.SERVICE_NOT_INSTALLED
    settings, fault = None, ""
    try:
        settings = _settings_of(manager)
    except VlmServerError as error:
        fault = str(error)
    return show(manager, settings, fault, as_json=arguments.json)


def logs(arguments: argparse.Namespace, manager: ServiceManager) -> int:
    """Print the end of the log, and what is added if that is wanted."""
    words = manager.log_command(arguments.lines, follow=arguments.follow)
    try:
        return subprocess.run(words, check=False).returncode
    except FileNotFoundError:
        raise CommandFailed(f"{words[0]} is not installed; the log is: {manager.log}") from None


def _install(manager: ServiceManager, new: Files) -> None:
    moved = transaction.is_moved(manager, new)
    transaction.write(new)
    manager.load(is_moved=moved)


def _wait(arguments: argparse.Namespace, manager: ServiceManager, settings: Settings) -> None:
    """Until the service has answered. Raises CommandFailed, after the end of its log."""
    url = url_of(settings.server.host, settings.server.port)
    if arguments.no_wait:
        print(f"Started. 'vlm-server service status' shows when {url} is ready.")
        return
    try:
        answer = wait_for_answer(manager, settings, lambda text: print(f"{text} …", flush=True))
    except CommandFailed:
        _show_log(manager)
        raise
    print(f"Ready: {url} was asked what a red circle is, and answered {answer!r}.")


def _show_log(manager: ServiceManager) -> None:
    words = manager.log_command(_LAST_LINES, follow=False)
    try:
        found = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return
    if found.stdout.strip():
        print(f"The last lines of its log:\n{found.stdout.rstrip()}", file=sys.stderr)


def _host(server: Server) -> str:
    """The IP address that the service's manager listens on. Raises ConfigError."""
    if server.port == 0:
        raise ConfigError("server.port 0: a service needs a port that others can know")
    try:
        return listener.numeric(server.host)
    except OSError as error:
        raise ConfigError(f"server.host {server.host!r} is not known: {error.strerror}") from None


def _check_address(manager: ServiceManager, server: Server) -> None:
    """Raises NotAvailable if somebody else listens there, who would answer in its place."""
    address = manager.read_address() if manager.path.exists() else ""
    host, _, port = address.rpartition(":")
    is_same = not address or is_at(server, [(host.strip("[]"), int(port))])
    if not (is_same and manager.is_listening()):
        listener.bind(server).close()


def _check_installed(manager: ServiceManager) -> None:
    if not manager.path.exists():
        raise CommandFailed("the service is not installed: 'vlm-server service install'")


def _settings_of(manager: ServiceManager) -> Settings:
    """Those in the installed files. Raises ConfigError, or CommandFailed if there are none."""
    _check_installed(manager)
    return options.load_settings(options.parse_settings(manager.read_words()[2:]))
