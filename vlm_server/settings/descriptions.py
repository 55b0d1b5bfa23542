"""Descriptions of the settings: the docstrings below their fields."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import msgspec

from vlm_server.settings.quantities import with_word
from vlm_server.settings.tree import Settings, hints_of

DEFAULT = "default"
Sources = Mapping[str, str]
"""The source of each given setting by `section.key`: a file, an environment variable or the command
line."""

_SECRET = frozenset({"server.api_keys"})


def describe_settings(settings: Settings, sources: Sources) -> list[dict[str, Any]]:
    """Each section with its settings: `name`, `value`, `default`, `source` and `description`.

    Of API keys only the number is shown.
    """
    return [
        {"name": name, "settings": _section(name, values, sources)}
        for name, values in settings.sections()
    ]


def descriptions(section: type[msgspec.Struct]) -> dict[str, str]:
    """The description of each setting of a section, by name."""
    texts: dict[str, str] = {}
    for kind in reversed(section.__mro__):
        if kind.__module__.startswith("vlm_server."):
            texts |= _in_module(kind.__module__)[kind.__name__]
    return texts


@cache
def _in_module(name: str) -> dict[str, dict[str, str]]:
    """The docstrings below fields, by class and field: Python itself does not keep them."""
    tree = ast.parse(inspect.getsource(sys.modules[name]))
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    return {node.name: dict(_docstrings(node)) for node in classes}


def _docstrings(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, text in pairwise(node.body):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(name)),
                ast.Expr(value=ast.Constant(value=str(docstring))),
            ):
                yield name, " ".join(docstring.split())


def _section(section: str, values: msgspec.Struct, sources: Sources) -> list[dict[str, Any]]:
    texts, hints = descriptions(type(values)), hints_of(type(values))
    fields_json = []
    for field in msgspec.structs.fields(type(values)):
        name = f"{section}.{field.name}"
        value = with_word(getattr(values, field.name), hints[field.name])
        if name in _SECRET:
            value = f"({len(value)} not shown)" if value else []
        fields_json.append(
            {
                "name": field.name,
                "value": value,
                "default": with_word(field.default, hints[field.name]),
                "source": sources.get(name, DEFAULT),
                "description": texts[field.name],
            }
        )
    return fields_json
