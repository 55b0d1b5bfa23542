"""What the checks look at: the settings, as far as they can be used, and where they come from."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vlm_server import settings
from vlm_server.cli import options
from vlm_server.cli.service.manager import ServiceManager, manager_for
from vlm_server.errors import ConfigError
from vlm_server.hub.find import located
from vlm_server.hub.names import to_download
from vlm_server.settings import Model, Settings, Sources


@dataclass(frozen=True)
class Situation:
    """One run of the doctor.

    `settings` are the defaults where `fault` says why those that were given can't be used. `model`
    is `settings.model` with the folder that was found; `model_fault` says why there is none.
    `arguments` are the options of the command line, or those in the installed service's file.
    """

    arguments: argparse.Namespace
    origin: str
    home: Path
    service: ServiceManager
    settings: Settings = field(default_factory=Settings)
    sources: Sources = field(default_factory=dict)
    fault: str = ""
    model: Model = field(default_factory=Model)
    model_fault: str = ""


def examine(arguments: argparse.Namespace) -> Situation:
    """Reads the settings. Without options they are those of the installed service, if there is one.

    Never raises for what is wrong with them. May hang where they are on a disk that does.
    """
    home = home_folder()
    manager = manager_for(sys.platform, home, os.environ)
    given = argparse.Namespace(**vars(arguments) | _NONE | _named(arguments))
    origin = "the command line" if given.set else "no file"
    if not _named(arguments) and (served := _of_service(manager)) is not None:
        given, origin = served, "the installed service"
    elif given.config is not None:
        origin = str(given.config)
    return _read(Situation(given, origin, home, manager))


def unread(arguments: argparse.Namespace, fault: str) -> Situation:
    """Of settings that can't be read; `fault` says why."""
    home = home_folder()
    given = argparse.Namespace(**vars(arguments) | _NONE | _named(arguments))
    return Situation(given, "", home, manager_for(sys.platform, home, os.environ), fault=fault)


def home_folder() -> Path:
    """The user's; the root if there is none."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


_NONE: dict[str, Any] = {
    "config": None,
    "set": [],
    "model": None,
    "chat_template": None,
    "allow_unchecked": None,
}


def _named(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of settings that were given."""
    return {name: value for name in _NONE if (value := getattr(arguments, name, None))}


def _of_service(manager: ServiceManager) -> argparse.Namespace | None:
    try:
        words = manager.read_words()
    except (OSError, ValueError, KeyError):
        return None
    parser = argparse.ArgumentParser(exit_on_error=False)
    options.add_model_option(parser)
    options.add_config_options(parser)
    try:
        return parser.parse_known_args(words[2:])[0]
    except (argparse.ArgumentError, SystemExit):
        return None


def _read(bare: Situation) -> Situation:
    overrides = tuple(options.overrides(bare.arguments))
    try:
        loaded, sources = settings.load_with_sources(bare.arguments.config, overrides)
    except ConfigError as error:
        return replace(bare, fault=str(error))
    read = replace(bare, settings=loaded, sources=sources)
    if not loaded.model.path:
        return read
    try:
        model = located(loaded.model)
        if to_download(model.path) is None:
            options.check_model(Path(model.path))
    except ConfigError as error:
        return replace(read, model=loaded.model, model_fault=str(error))
    return replace(read, model=model)
