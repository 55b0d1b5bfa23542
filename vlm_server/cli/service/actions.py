"""Actions of `vlm-server service`, one at a time, undone if they fail."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from vlm_server.cli import exit_codes, options
from vlm_server.cli.client.daemon import url_of
from vlm_server.cli.exit_codes import CommandFailed
from vlm_server.cli.serve import listener
from vlm_server.cli.serve.listener import is_at
from vlm_server.cli.service.manager import (
    Files,
    ServiceCommand,
    ServiceManager,
    manager_for,
    run_command,
    split_address,
)
from vlm_server.cli.service.program import installed_program
from vlm_server.cli.service.status import show, wait_for_answer
from vlm_server.cli.text import say
from vlm_server.errors import ConfigError, VlmServerError
from vlm_server.platform.private_folder import replace_file
from vlm_server.settings import Server, Settings, settings_in, variable_of

_HOW_TO_INSTALL = "'vlm-server service install' installs and starts it"
_LAST_LINES = 20
"""Lines of the log that are shown after a failure."""


def install(arguments: argparse.Namespace, manager: ServiceManager) -> int:
    """Install the service, or leave all as it was. Raises VlmServerError."""
    arguments.config = options.config_file(arguments)
    if variables := [*map(variable_of, settings_in(os.environ))]:
        say(
            f"{', '.join(variables)} of this shell are not settings of the service: put them into "
            "its settings file"
        )
    settings = options.load_settings(arguments, environment={})
    options.check_memory_limit(settings)
    command = ServiceCommand(
        program=installed_program(),
        arguments=["serve", *options.settings_arguments(arguments), "--reload"],
        host=_host(settings.server),
        port=settings.server.port,
        drain_seconds=settings.server.drain_timeout_seconds,
    )
    files = manager.render(command)
    if arguments.dry_run:
        for path, content in files.items():
            print(f"# {path}\n{content.decode()}")
        return 0
    with lock(manager):
        _check_address(manager, settings.server)
        with undo_on_failure(manager):
            moves = is_moved(manager, files)
            write(files)
            manager.load(is_moved=moves)
            print(f"Installed {manager.path}", flush=True)
            _wait(arguments, manager, settings)
    return 0


def start(arguments: argparse.Namespace, manager: ServiceManager) -> int:
    """Start the service, or restart it, unless its settings are wrong. Raises VlmServerError."""
    with lock(manager):
        settings = _settings_of(manager)
        getattr(manager, arguments.action)()
        _wait(arguments, manager, settings)
    return 0


def stop(_: argparse.Namespace, manager: ServiceManager) -> int:
    """Finish running answers, and stop. Raises CommandFailed."""
    with lock(manager):
        _check_installed(manager)
        manager.stop()
    print("Stopped.")
    return 0


def uninstall(_: argparse.Namespace, manager: ServiceManager) -> int:
    """Stop the service and remove its files; does nothing if it is not installed."""
    with lock(manager):
        was_installed = manager.path.exists()
        remove(manager)
    print(f"Removed {manager.path}" if was_installed else "The service was not installed.")
    return 0


def status(arguments: argparse.Namespace, manager: ServiceManager) -> int:
    """Print the service's state. Returns one of `exit_codes.SERVICE_MEANINGS`."""
    if not manager.path.exists():
        state = "not installed"
        print(json.dumps({"state": state}) if arguments.json else f"{state}: {_HOW_TO_INSTALL}")
        return exit_codes.SERVICE_NOT_INSTALLED
    settings, fault = None, ""
    try:
        settings = _settings_of(manager)
    except VlmServerError as error:
        fault = str(error)
    return show(manager, settings, fault, as_json=arguments.json)


def logs(arguments: argparse.Namespace, manager: ServiceManager) -> int:
    """Print the end of the log, and new lines if they are wanted; it outlives the service."""
    if not manager.path.exists():
        say(f"The service is not installed: {_HOW_TO_INSTALL}.")
    words = manager.log_command(arguments.lines, follow=arguments.follow)
    try:
        return subprocess.run(words, check=False).returncode
    except FileNotFoundError:
        raise CommandFailed(f"{words[0]} is not installed; the log is: {manager.log}") from None


_ACTIONS = {
    "install": install,
    "start": start,
    "restart": start,
    "stop": stop,
    "uninstall": uninstall,
    "status": status,
    "logs": logs,
}


def run(arguments: argparse.Namespace, manager: ServiceManager | None = None) -> int:
    """Run the action of the command line on this system's service. Raises VlmServerError."""
    manager = manager or manager_for(sys.platform, Path.home(), os.environ)
    return _ACTIONS[arguments.action](arguments, manager)


def _wait(arguments: argparse.Namespace, manager: ServiceManager, settings: Settings) -> None:
    """Wait for the service's first answer. Raises CommandFailed, after the end of its log."""
    url = url_of(settings.server.host, settings.server.port)
    if arguments.no_wait:
        print(f"Started. 'vlm-server service status' shows when {url} is ready.")
        return
    try:
        answer = wait_for_answer(manager, settings, lambda text: print(f"{text} …", flush=True))
    except CommandFailed:
        log = run_command(manager.log_command(_LAST_LINES, follow=False)).stdout.rstrip()
        if log:
            print(f"The last lines of its log:\n{log}", file=sys.stderr)
        raise
    print(f"Ready: {url} was asked what a red circle is, and answered {answer!r}.")


def _host(server: Server) -> str:
    """IP address that the service's manager listens on. Raises ConfigError."""
    if server.port == 0:
        raise ConfigError("server.port 0: a service needs a port that others can know")
    try:
        return listener.numeric(server.host)
    except OSError as error:
        raise ConfigError(f"server.host {server.host!r} is not known: {error.strerror}") from None


def _check_address(manager: ServiceManager, server: Server) -> None:
    """Raises NotAvailable if another program listens at the address of the service."""
    address = manager.read_address() if manager.path.exists() else ""
    is_same = not address or is_at(server, [split_address(address)])
    if not (is_same and manager.is_listening()):
        listener.bind(server).close()


def _check_installed(manager: ServiceManager) -> None:
    if not manager.path.exists():
        raise CommandFailed(f"the service is not installed: {_HOW_TO_INSTALL}")


def _settings_of(manager: ServiceManager) -> Settings:
    """The settings in the installed files. Raises ConfigError, or CommandFailed without files."""
    _check_installed(manager)
    return options.load_settings(options.parse_settings(manager.read_words()[2:]), environment={})


@contextlib.contextmanager
def lock(manager: ServiceManager) -> Iterator[None]:
    """A lock on the service, by the folder of its files. Raises CommandFailed if it is taken."""
    folder = manager.path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise CommandFailed(f"can't write {folder}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandFailed(
                "another 'vlm-server service' command is running: try again when it is done"
            ) from None
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def undo_on_failure(manager: ServiceManager) -> Iterator[None]:
    """Restore the service's files and state if the block fails; a VlmServerError then says so."""
    old_files = manager.files()
    was_running = manager.is_running()
    try:
        yield
    except VlmServerError as error:
        raise CommandFailed(f"{error}\n{_undo(manager, old_files, was_running)}") from None
    except BaseException:
        _undo(manager, old_files, was_running)
        raise


def write(files: Files) -> None:
    """Replace the files, each atomically, readable by their owner only. Raises CommandFailed."""
    for path, content in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content)
        except OSError as error:
            raise CommandFailed(f"can't write {path}: {error.strerror}") from None


def remove(manager: ServiceManager) -> None:
    """Stop the service and remove its files."""
    manager.unload()
    for path in manager.paths:
        path.unlink(missing_ok=True)
    manager.forget()


def is_moved(manager: ServiceManager, new_files: Files) -> bool:
    """Whether the service manager listens on another address with the `new_files` files."""
    old_files, path = manager.files(), manager.paths[-1]
    return path not in old_files or old_files[path] != new_files.get(path)


def _undo(manager: ServiceManager, old_files: Files, was_running: bool) -> str:
    """Restore the service; returns a sentence about its state."""
    if manager.path not in old_files:
        remove(manager)
        return "Nothing was installed."
    moves = is_moved(manager, old_files)
    added_paths = set(manager.files()) - set(old_files)
    if added_paths:
        manager.unload()
    for path in added_paths:
        path.unlink()
    try:
        write(old_files)
        if was_running:
            manager.load(is_moved=moves)
            return "The service that was installed before runs again."
        manager.stop()
        manager.forget()
    except CommandFailed as error:
        return f"The files are those from before, but that service does not start: {error}"
    return "The service that was installed before is as it was: not running."
