"""All settings in force, and the source of each; without secrets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec

from vlm_server.settings.quantities import Share
from vlm_server.settings.tree import Settings

DEFAULT = "default"
Sources = Mapping[str, str]
"""The source of each given setting, a file or the command line, by `section.key`."""

_SECRET = frozenset({"server.api_keys"})


def described(settings: Settings, sources: Sources) -> list[dict[str, Any]]:
    """Each section with its settings: `name`, `value`, `default`, `source` and `description`.

    Of keys only their number is told.
    """
    return [
        {"name": name, "settings": _section(name, values, sources)}
        for name, values in settings.sections()
    ]


def _section(section: str, values: msgspec.Struct, sources: Sources) -> list[dict[str, Any]]:
    hints = get_type_hints(type(values), include_extras=True)
    shown = []
    for field in msgspec.structs.fields(type(values)):
        name = f"{section}.{field.name}"
        value = getattr(values, field.name)
        if name in _SECRET:
            value = f"({len(value)} not shown)" if value else []
        elif isinstance(value, Share):
            value = str(value)
        shown.append(
            {
                "name": field.name,
                "value": value,
                "default": field.default,
                "source": sources.get(name, DEFAULT),
                "description": _description(hints[field.name]),
            }
        )
    return shown


def _description(hint: Any) -> str:
    metas = (each for each in getattr(hint, "__metadata__", ()) if isinstance(each, msgspec.Meta))
    return next((meta.description or "" for meta in metas), "")
