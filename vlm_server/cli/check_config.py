"""`vlm-server check-config`: validates the settings, or prints `configs/default.toml`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import textwrap
from typing import Literal, get_args, get_origin, get_type_hints

import msgspec

from vlm_server.cli import options
from vlm_server.cli.usage import Parser
from vlm_server.errors import ModelLoadError
from vlm_server.hub.examination import ExaminationRequest, examine
from vlm_server.settings import ListedModel, Settings
from vlm_server.settings.descriptions import descriptions
from vlm_server.settings.quantities import shown
from vlm_server.settings.tree import hints_of

_WIDTH = 88
_MODEL_SECTIONS = 2
"""Place of the example of `[models.NAME]`: after `[server]` and `[model]`."""
_HEADING = """\
# All settings with their defaults. Copy those you change to a file of your own and pass it:
# vlm-server serve --config FILE
"""


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
    settings = options.load_settings(arguments)
    options.check_memory_limit(settings)
    check_models(settings)
    print("The settings are valid.")
    return 0


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
    blocks = [f"[{name}]\n"]
    hints = hints_of(type(section))
    for field in msgspec.structs.fields(section):
        comment = textwrap.wrap(describe(type(section), field.name), _WIDTH, break_on_hyphens=False)
        shown_value = shown(field.name, getattr(section, field.name), hints[field.name])
        value = json.dumps(shown_value, ensure_ascii=False)
        blocks += [*(f"# {line}\n" for line in comment), f"{field.name} = {value}\n"]
    return "".join(blocks)


def _render_example(model: ListedModel) -> str:
    """The table of one more model, all of it as comments."""
    lines = _render_section("models.NAME", model).splitlines(keepends=True)
    heading = "# More models, a table for each; see docs/models.md.\n"
    return heading + "".join(f"# {line}" for line in lines)
