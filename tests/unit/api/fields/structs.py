"""The paths of all fields that the structs of a request have.

A path is written as in `X-VLM-Ignored`, with the tag of the struct where there are several:
`messages[].content[]{image_url}.image_url.detail`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
from msgspec import inspect


class Place(NamedTuple):
    """A leaf may hold something besides other fields."""

    is_leaf: bool
    is_required: bool


def paths_of(*structs: type[msgspec.Struct]) -> dict[str, Place]:
    """All field paths of the structs, with the place at each."""
    found = dict[str, Place]()
    for struct in structs:
        kind = inspect.type_info(struct)
        assert isinstance(kind, inspect.StructType)
        found |= dict(_below(kind, ""))
    return found


def _below(struct: inspect.StructType, prefix: str) -> Iterator[tuple[str, Place]]:
    for field in struct.fields:
        path = f"{prefix}{field.encode_name}"
        kinds = list(_flat(field.type, ""))
        structs = [(kind, where) for kind, where in kinds if isinstance(kind, inspect.StructType)]
        yield path, Place(len(structs) < len(kinds) or not structs, field.required)
        for kind, where in structs:
            is_one_of_many = kind.tag_field is not None and (len(structs) > 1 or where)
            tag = f"{{{kind.tag}}}" if is_one_of_many else ""
            yield from _below(kind, f"{path}{where}{tag}.")


def _flat(kind: inspect.Type, where: str) -> Iterator[tuple[inspect.Type, str]]:
    """The types a field may hold besides null, and whether in a list (`[]`)."""
    match kind:
        case inspect.UnionType(types=kinds):
            yield from _all(kinds, where)
        case inspect.ListType(item_type=item):
            inner = list(_flat(item, f"{where}[]"))
            if all(isinstance(each, inspect.StructType) for each, _ in inner):
                yield from inner
            else:
                yield kind, where
        case inspect.Metadata(type=inner_kind):
            yield from _flat(inner_kind, where)
        case inspect.NoneType():
            return
        case _:
            yield kind, where


def _all(kinds: Iterable[inspect.Type], where: str) -> Iterator[tuple[inspect.Type, str]]:
    for kind in kinds:
        yield from _flat(kind, where)
