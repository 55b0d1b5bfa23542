"""`vlm-server service`: installs, removes and checks the daemon as a user's service."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vlm_server.cli import options
from vlm_server.cli.client.daemon import Daemon
from vlm_server.cli.failure import CommandFailed
from vlm_server.cli.serve import url_of
from vlm_server.cli.service.files import ServiceCommand
from vlm_server.cli.service.manager import ServiceManager, manager_for
from vlm_server.cli.service.program import installed_program
from vlm_server.settings import Settings

if TYPE_CHECKING:
    from vlm_server.cli.options import Commands


def add_to(commands: Commands) -> None:
    """Add the command and its three actions to the command line."""
    parser = commands.add_parser("service", help="run the daemon in the background from login on")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    install_parser = actions.add_parser("install", help="install the service and start it")
    options.add_model_option(install_parser)
    options.add_config_options(install_parser)
    install_parser.add_argument(
        "--dry-run", action="store_true", help="print the file without installing it"
    )
    install_parser.set_defaults(run=lambda arguments: install(arguments, _manager()))
    uninstall_parser = actions.add_parser("uninstall", help="stop the service and remove it")
    uninstall_parser.set_defaults(run=lambda _: uninstall(_manager()))
    status_parser = actions.add_parser("status", help="show whether it is installed and ready")
    status_parser.set_defaults(run=lambda _: status(_manager()))


def install(arguments: argparse.Namespace, manager: ServiceManager) -> int:
    """Write the service's file and load it. Raises ConfigError or CommandFailed."""
    settings = options.load_settings(arguments)
    command = ServiceCommand(
        program=installed_program(),
        arguments=["serve", *options.settings_arguments(arguments)],
        drain_seconds=settings.server.drain_seconds,
    )
    if arguments.dry_run:
        print(manager.render(command).decode(), end="")
        return 0
    write_privately(manager.path, manager.render(command))
    print(f"Installed {manager.path}")
    manager.load()
    print(f"Started. 'vlm-server service status' shows when {_url(settings)} is ready.")
    return 0


def uninstall(manager: ServiceManager) -> int:
    """Stop the service and remove its file; does nothing if it is not installed."""
    manager.unload()
    try:
        manager.path.unlink()
    except FileNotFoundError:
        print("The service was not installed.")
    else:
        print(f"Removed {manager.path}")
    return 0


def status(manager: ServiceManager) -> int:
    """Print the service's state; returns 0 if it is ready. Raises ConfigError."""
    try:
        words = manager.read_words()
    except FileNotFoundError:
        print("not installed")
        return 1
    print(f"installed: {manager.path}")
    is_running = manager.is_running()
    print("running" if is_running else "not running")
    if not is_running:
        return 1
    url = _url(_settings_of(words))
    is_ready = _is_ready(url)
    print(f"{'ready' if is_ready else 'not ready yet'}: {url}")
    return 0 if is_ready else 1


def write_privately(path: Path, content: bytes) -> None:
    """Replace `path` atomically by `content`, readable by its owner only."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.touch(mode=0o600)
        draft.write_bytes(content)
        draft.replace(path)
    except OSError as error:
        raise CommandFailed(f"can't write {path}: {error.strerror}") from None


def _settings_of(words: list[str]) -> Settings:
    parser = argparse.ArgumentParser(prog="vlm-server serve")
    options.add_model_option(parser)
    options.add_config_options(parser)
    return options.load_settings(parser.parse_args(words[2:]))


def _is_ready(url: str) -> bool:
    with Daemon(url) as daemon:
        return daemon.is_there() and daemon.is_ready()


def _url(settings: Settings) -> str:
    return url_of(settings.server.host, settings.server.port)


def _manager() -> ServiceManager:
    return manager_for(sys.platform, Path.home(), os.environ)
