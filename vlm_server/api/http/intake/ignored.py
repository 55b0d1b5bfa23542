"""Which fields of a body have no effect, for the log and for the client.

Knows JSON and the structs that decode it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, TypeVar

from msgspec import inspect

MAX_NAMES = 32
_MAX_NAME_CHARS = 64

K = TypeVar("K", bound=inspect.Type)


def fields_without_effect(value: dict[str, Any], schema: type) -> tuple[str, ...]:
    """The paths of what is in `value` and not in `schema`, to which it conforms; nulls aside.

    Each path once, whatever the positions in lists: `messages[].content[].citations`. Names are
    cut and made safe for a header, and there are at most `MAX_NAMES`.
    """
    paths = dict.fromkeys(_unknown(value, _type_of(schema), ""))
    shown = list(paths)[:MAX_NAMES]
    return (*shown, "...") if len(paths) > len(shown) else tuple(shown)


@cache
def _type_of(schema: type) -> inspect.Type:
    return inspect.type_info(schema)


def _unknown(value: Any, kind: inspect.Type, path: str) -> Iterator[str]:
    if isinstance(value, list):
        for item_kind in (each.item_type for each in _kinds(kind, inspect.ListType)):
            for item in value:
                yield from _unknown(item, item_kind, f"{path}[]")
    elif isinstance(value, dict):
        struct = _struct_of(value, kind)
        if struct is not None:
            yield from _unknown_in(value, struct, path)


def _unknown_in(value: dict[str, Any], struct: inspect.StructType, path: str) -> Iterator[str]:
    known = {field.encode_name: field.type for field in struct.fields}
    for name, inner in value.items():
        inner_path = f"{path}.{_shown(name)}" if path else _shown(name)
        if name in known:
            yield from _unknown(inner, known[name], inner_path)
        elif name != struct.tag_field and inner is not None:
            yield inner_path


def _struct_of(value: dict[str, Any], kind: inspect.Type) -> inspect.StructType | None:
    """The one that `value` was decoded with; None if it is of any form."""
    for struct in _kinds(kind, inspect.StructType):
        if struct.tag_field is None or value.get(struct.tag_field) == struct.tag:
            return struct
    return None


def _kinds(kind: inspect.Type, wanted: type[K]) -> list[K]:
    types = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return [each for each in types if isinstance(each, wanted)]


def _shown(name: str) -> str:
    shown = name[:_MAX_NAME_CHARS]
    return "".join(c if "!" <= c <= "~" and c != "," else "?" for c in shown)
