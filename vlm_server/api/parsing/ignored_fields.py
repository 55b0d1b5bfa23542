"""Ignored fields: fields of a body without effect, reported to clients.

Clients send back their own objects with any fields, so unknown fields inside messages and parts are
ignored. Unknown fields at the top are refused by name, unless null or `server.unknown_fields` says
otherwise: a client may rely on them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from vlm_server.errors import UnsupportedField

MAX_NAMES = 32
_MAX_NAME_CHARS = 64
_MAX_PATH_CHARS = 256
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\[\]-]")
"""Characters not allowed in a header or a log line."""
_NOTHING: tuple[Any, ...] = (None, "", [], {})
"""Values without effect in any field."""


class IgnoredFields:
    """The paths of fields without effect, each once: `messages[].name`."""

    def __init__(self) -> None:
        self._paths: dict[str, None] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """At most `MAX_NAMES`, fit for a header."""
        names = tuple(self._paths)
        return names if len(names) <= MAX_NAMES else (*names[: MAX_NAMES - 1], "...")

    def add(self, path: str, value: Any = True) -> None:
        """Add the field at `path`, unless its value is empty."""
        if len(self._paths) < MAX_NAMES + 1 and value not in _NOTHING:
            self._paths[safe_name(path)] = None

    def add_given(self, fields: Any, *paths: str) -> None:
        """Add those of `paths` that have a value in `fields`, the JSON of a body."""
        for path in paths:
            for value in _values_at(fields, path.split(".")):
                self.add(path, value)

    def add_unread(self, value: Any, parsed: Any, path: str = "") -> None:
        """Add the fields of the JSON `value` at `path` that the struct `parsed` lacks."""
        if isinstance(parsed, msgspec.Struct):
            self._add_unread_of(value, parsed, path)
        elif isinstance(parsed, list | tuple):
            for inner, inner_parsed in zip(value, parsed, strict=True):
                self.add_unread(inner, inner_parsed, f"{path}[]")

    def _add_unread_of(self, fields: dict[str, Any], parsed: msgspec.Struct, path: str) -> None:
        kind = type(parsed)
        attributes = dict(zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True))
        for name, value in fields.items():
            inner = f"{path}.{name[:_MAX_NAME_CHARS]}" if path else name[:_MAX_NAME_CHARS]
            if name in attributes:
                self.add_unread(value, getattr(parsed, attributes[name]), inner)
            elif name != kind.__struct_config__.tag_field:
                self.add(inner, value)


def _values_at(value: Any, steps: list[str]) -> Iterator[Any]:
    if not steps:
        yield value
    elif isinstance(value, dict):
        name = steps[0].removesuffix("[]")
        inner = value.get(name)
        step_value = [inner] if name == steps[0] else inner
        for element in step_value if isinstance(step_value, list) else ():
            yield from _values_at(element, steps[1:])


def safe_name(path: str) -> str:
    """The beginning of `path`, fit for a header and a line of a log."""
    return _UNSAFE.sub("?", path[:_MAX_PATH_CHARS])


def check_neutral(name: str, value: Any, neutral: Sequence[Any]) -> None:
    """Raises UnsupportedField unless `value` is one of the `neutral` ones, without effect."""
    if not any(is_same(value, neutral_value) for neutral_value in neutral):
        raise UnsupportedField(f"`{name}` is not supported with this value; leave it out.", name)


def is_same(value: Any, other: Any) -> bool:
    """Equality of JSON values where True is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def known_fields(
    fields: dict[str, Any], schema: type[msgspec.Struct], ignored: IgnoredFields, *, refuses: bool
) -> dict[str, Any]:
    """The fields of a body that `schema` has; the others go to `ignored`.

    If the server `refuses` unknown fields, those with a value stay, to be refused by name.
    """
    fields_of_schema = dict[str, Any]()
    for name, value in fields.items():
        if name in schema.__struct_encode_fields__ or (refuses and value is not None):
            fields_of_schema[name] = value
        else:
            ignored.add(name[:_MAX_NAME_CHARS], value)
    return fields_of_schema
