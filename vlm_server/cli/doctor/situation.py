"""Subject of the checks: the settings, if usable, and their origin."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vlm_server import settings
from vlm_server.cli import options
from vlm_server.cli.service.manager import ServiceManager, manager_for
from vlm_server.errors import ConfigError
from vlm_server.settings import ModelSettings, Settings, Sources

_NO_FILE, _SERVICE = "no file", "the installed service"


@dataclass(frozen=True)
class Situation:
    """The subject of one run of the doctor.

    `fault` is the reason why the given settings can't be used; `settings` are then the defaults.
    `model` is `settings.model` with the folder found; `model_fault` says why there is none.
    `arguments` are the options of the command line, or those in the installed service's file;
    `is_given` says that they name settings, so that no daemon with others is looked for.
    """

    arguments: argparse.Namespace
    origin: str
    home: Path
    service: ServiceManager
    settings: Settings = field(default_factory=Settings)
    sources: Sources = field(default_factory=dict)
    fault: str = ""
    model: ModelSettings = field(default_factory=ModelSettings)
    model_fault: str = ""
    is_given: bool = False


def examine(arguments: argparse.Namespace) -> Situation:
    """The situation by the command line, else by the service. Never raises for settings."""
    is_given = bool(arguments.config or arguments.set)
    bare = replace(unread(arguments, ""), is_given=is_given)
    used_arguments, origin = bare.arguments, _NO_FILE
    if used_arguments.config is not None:
        origin = str(used_arguments.config)
    elif used_arguments.set:
        origin = "the command line"
    elif not _model_options(arguments):
        with contextlib.suppress(OSError, ValueError, KeyError, ConfigError):
            used_arguments = options.parse_settings(bare.service.read_words()[2:])
            origin = _SERVICE
    used_arguments.config = options.config_file(used_arguments)
    if origin == _NO_FILE and used_arguments.config is not None:
        origin = str(used_arguments.config)
    return _read(replace(bare, arguments=used_arguments, origin=origin))


def unread(arguments: argparse.Namespace, fault: str) -> Situation:
    """Situation without settings; `fault` says why."""
    none = vars(options.parse_settings([]))
    used_arguments = argparse.Namespace(**vars(arguments) | none | _model_options(arguments))
    try:
        home = Path.home()
    except RuntimeError:
        home = Path("/")
    return Situation(
        used_arguments, "", home, manager_for(sys.platform, home, os.environ), fault=fault
    )


def _model_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of model and settings that were given."""
    names = vars(options.parse_settings([]))
    return {name: value for name in names if (value := getattr(arguments, name, None))}


def _read(bare: Situation) -> Situation:
    overrides = tuple(options.overrides(bare.arguments))
    try:
        environment = {} if bare.origin == _SERVICE else os.environ
        loaded_settings, sources = settings.load_with_sources(
            bare.arguments.config, overrides, environment
        )
    except ConfigError as error:
        return replace(bare, fault=str(error))
    situation = replace(bare, settings=loaded_settings, sources=sources)
    if not loaded_settings.model.path:
        return situation
    try:
        return replace(situation, model=options.find_checkpoint(loaded_settings.model))
    except ConfigError as error:
        return replace(situation, model=loaded_settings.model, model_fault=str(error))
