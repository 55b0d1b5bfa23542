"""`vlm-server check-config`: validates the settings, or prints `configs/default.toml`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import textwrap
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from vlm_server.cli import options
from vlm_server.cli.text import from_home, say
from vlm_server.cli.usage import Parser
from vlm_server.errors import ModelLoadError, ModelMissing, NotAvailable
from vlm_server.hub.examination import ExaminationRequest, examine
from vlm_server.hub.names import to_download
from vlm_server.nearest import did_you_mean
from vlm_server.platform.machine import memory_bytes
from vlm_server.platform.private_folder import caches_folder
from vlm_server.settings import ListedModel, Settings, Sources, default_file
from vlm_server.settings.descriptions import DEFAULT, describe_settings, descriptions
from vlm_server.settings.faults import Places
from vlm_server.settings.paths import expand_home
from vlm_server.settings.quantities import shown, unit_of
from vlm_server.settings.topics import is_fuse
from vlm_server.settings.tree import hints_of
from vlm_server.sizes import memory_size

_WIDTH = 88
_MODEL_SECTIONS = 2
"""Place of the example of `[models.NAME]`: after `[server]` and `[model]`."""
_HEADING = """\
# All settings with their defaults. Copy those you change to a file of your own:
# ~/.config/vlm-server/config.toml, or FILE of vlm-server serve --config FILE.
# A name ends with the unit of a plain number; see docs/configuration.md.
"""
_ON_DISK = {
    *("cache.max_disk_bytes", "files.max_bytes", "files.max_file_bytes"),
    "batches.max_output_bytes",
}
"""Limits of what is on a disk; all other sizes are of memory."""
_FUSES = "Bounds that only mistakes and attacks meet: docs/limits.md."


def add_to(parser: Parser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Validates the settings and their models, names all faults at once, and starts nothing."
    )
    options.add_config_options(parser)
    options.add_model_option(parser)
    parser.add_argument(
        "--print-defaults", action="store_true", help="print all settings with their defaults"
    )
    parser.set_defaults(run="check_config:run")


def run(arguments: argparse.Namespace) -> int:
    """Validate the settings, and say of all faults at once where they are.

    Raises ConfigError, or ModelLoadError if only models can't be served. What is not there at
    present is no fault: the daemon may be meant for another machine, unless --model names a path.
    """
    if arguments.print_defaults:
        print(render_defaults(), end="")
        return 0
    settings, places, faults = options.read_settings(arguments)
    elsewhere = NotAvailable if arguments.model else ModelMissing | NotAvailable
    absent = [fault for fault in faults if isinstance(fault, elsewhere)]
    warnings = (*not_here(settings, places), *beyond_machine(settings, places))
    for text in (*map(str, absent), *warnings):
        say(text, "warning: ")
    options.raise_all([fault for fault in faults if fault not in absent])
    if unusable := list(unusable_models(settings)):
        raise ModelLoadError(*unusable)
    if changed := describe_changed(settings, places.sources):
        print(changed)
    if arguments.config is None:
        state = "read" if options.config_file(arguments) else "not there"
        print(f"Default file: {from_home(str(default_file(os.environ)))} ({state})")
    print("The settings are valid.")
    return 0


def not_here(settings: Settings, places: Places) -> Iterator[str]:
    """What there is to say about each model of the hub that is not on this machine."""
    absent = [
        (f"{section}.path", model.path)
        for section, model in settings.checkpoints()
        if model.path and to_download(model.path) is not None and not os.path.isdir(model.path)
    ]
    if not absent:
        return
    from vlm_server.hub.find import all_names  # slow to import

    names = all_names(settings.model.search_folders)
    for full, path in absent:
        hint = did_you_mean(path, names) or ", and is downloaded when it is needed"
        yield f"{places.of(full)}`{full}`: {path} is not on this machine{hint}"


def beyond_machine(settings: Settings, places: Places) -> Iterator[str]:
    """What there is to say about each limit that is above what this machine has."""
    from vlm_server.cli.doctor import machine  # slow to import

    if settings.cache.max_disk_bytes:
        found = machine.room_for_cache(settings.cache, caches_folder(expand_home("~")))
        if found.level != "ok":
            full = "cache.max_disk_bytes"
            yield f"{places.of(full)}`{full}`: {found.text}: {found.advice}"
    limits = {
        full: getattr(section, key)
        for name, section in settings.sections()
        for key in section.__struct_fields__
        if (full := f"{name}.{key}") in places.sources and full not in _ON_DISK
        if key.startswith("max_") and unit_of(key) == "bytes"
    }
    device_bytes = _device_bytes(settings) if limits else 0
    host_bytes = max(device_bytes, memory_bytes())
    for full, limit_bytes in limits.items():
        here_bytes = device_bytes if full.startswith("memory.") else host_bytes
        if isinstance(limit_bytes, int) and here_bytes and limit_bytes > here_bytes:
            yield (
                f"{places.of(full)}`{full}`: {memory_size(limit_bytes)} is more than this machine "
                f"has ({memory_size(here_bytes)}) and bounds nothing: lower it, or leave it out"
            )


def _device_bytes(settings: Settings) -> int:
    """The memory of the device that models run on; 0 if it can't be examined."""
    from vlm_server.cli.doctor import device  # slow to import

    if device.nvidia_driver() is None:
        return memory_bytes()
    return device.try_device(settings.engine).memory_bytes


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


def unusable_models(settings: Settings) -> Iterator[str]:
    """Each local model with unusable files or beyond the memory limit, and why.

    Loads nothing; models that several hosts share are not checked.
    """
    try:
        options.check_memory_limit(settings)
    except ModelLoadError as error:
        yield str(error)
        return
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
            yield f"{model.name}: {examination.refusal}"


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
