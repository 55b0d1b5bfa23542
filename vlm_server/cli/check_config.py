"""`vlm-server check-config`: validates the settings, or prints `configs/default.toml`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import textwrap
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from vlm_server.cli import options
from vlm_server.cli.usage import Parser
from vlm_server.errors import ModelLoadError
from vlm_server.hub.examination import ExaminationRequest, examine
from vlm_server.settings import ListedModel, Settings, Sources
from vlm_server.settings.descriptions import DEFAULT, describe_settings, descriptions
from vlm_server.settings.quantities import shown
from vlm_server.settings.topics import is_fuse
from vlm_server.settings.tree import hints_of

_WIDTH = 88
_MODEL_SECTIONS = 2
"""Place of the example of `[models.NAME]`: after `[server]` and `[model]`."""
_HEADING = """\
# All settings with their defaults. Copy those you change to a file of your own:
# ~/.config/vlm-server/config.toml, or FILE of vlm-server serve --config FILE.
# A name ends with the unit of a plain number; see docs/configuration.md.
"""
_FUSES = "Bounds that only mistakes and attacks meet: docs/limits.md."


def add_to(parser: Parser) -> None:
    """Add the options of the command."""
    options.add_config_options(parser)
    options.add_model_option(parser)
    parser.add_argument(
        "--print-defaults", action="store_true", help="print all settings with their defaults"
    )
    parser.set_defaults(run="check_config:run")


def run(arguments: argparse.Namespace) -> int:
    """Validate the settings. Raises ConfigError, or ModelLoadError if a model can't be served."""
    if arguments.print_defaults:
        print(render_defaults(), end="")
        return 0
    settings, sources = options.load_settings_with_sources(arguments)
    options.check_memory_limit(settings)
    check_models(settings)
    if changed := describe_changed(settings, sources):
        print(changed)
    print("The settings are valid.")
    return 0


def describe_changed(settings: Settings, sources: Sources) -> str:
    """The settings that were given, by source; those that are as by default say so."""
    lines: dict[str, list[str]] = {}
    for section in describe_settings(settings, sources):
        for setting in section["settings"]:
            if setting["source"] != DEFAULT:
                name = setting["name"]
                value, usual = (shown(name, setting[key], None) for key in ("value", "default"))
                note = "the default" if value == usual else f"default {_toml(usual)}"
                line = f"  {section['name']}.{name} = {_toml(value)}  ({note})"
                lines.setdefault(setting["source"], []).append(line)
    return "\n".join(f"{source}\n" + "\n".join(each) for source, each in lines.items())


def check_models(settings: Settings) -> None:
    """Raises ModelLoadError for a local model with unusable files or beyond the memory limit.

    Loads nothing; models that several hosts share are not checked.
    """
    search_folders = settings.model.search_folders
    listed_models = [
        listed_model.as_model(name, search_folders)
        for name, listed_model in settings.models.items()
    ]
    local_models = [
        model for model in (settings.model, *listed_models) if os.path.isdir(model.path)
    ]
    for model in local_models if not settings.distributed.hostfile else ():
        adapters = settings.adapters_of(model.name)
        request = ExaminationRequest(
            model, settings.memory, adapters=adapters, cache=settings.cache
        )
        examination = asyncio.run(examine(request))
        if examination.refusal:
            raise ModelLoadError(f"{model.name}: {examination.refusal}")


def render_defaults() -> str:
    """The text of `configs/default.toml`."""
    defaults = Settings()
    sections = [_render_section(name, section) for name, section in defaults.sections()]
    sections.insert(_MODEL_SECTIONS, _render_example(ListedModel(path="org/name")))
    return "\n".join([_HEADING, *sections])


def describe(section: type[msgspec.Struct], name: str) -> str:
    """The description of one setting, with its choices if it has any."""
    kind = get_type_hints(section)[name]
    text = descriptions(section)[name]
    if get_origin(kind) is Literal:
        text += " One of: " + ", ".join(map(str, get_args(kind))) + "."
    return text


def _render_section(name: str, section: msgspec.Struct) -> str:
    """A table, its fuses last."""
    names = sorted(type(section).__struct_fields__, key=lambda key: is_fuse(f"{name}.{key}"))
    fuses = [key for key in names if is_fuse(f"{name}.{key}")]
    blocks = [f"[{name}]\n"]
    for key in names:
        if fuses and key == fuses[0]:
            blocks += ["\n"] * (len(names) > len(fuses)) + [f"# {_FUSES}\n\n"]
        comment = textwrap.wrap(describe(type(section), key), _WIDTH, break_on_hyphens=False)
        value = shown(key, getattr(section, key), hints_of(type(section))[key])
        blocks += [*(f"# {line}\n" for line in comment), f"{key} = {_toml(value)}\n"]
    return "".join(blocks)


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _render_example(model: ListedModel) -> str:
    """The table of one more model, all of it as comments."""
    lines = _render_section("models.NAME", model).splitlines(keepends=True)
    heading = "# More models, a table for each; see docs/models.md.\n"
    return heading + "".join(f"# {line}" for line in lines)
