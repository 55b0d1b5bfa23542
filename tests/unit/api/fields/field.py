"""Declarations of request fields: how each is read, and a case that shows it.

`docs/fields.md` is made of the declarations, and `test_fields.py` tries every one."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import httpx
import msgspec

from tests.support import pdf
from tests.support.image_files import image_file
from tests.unit.api.scripted_engine import HELLO, Step

Body = dict[str, Any]
_STEP = re.compile(r"(?P<name>[\w-]+)(?P<list>\[(?P<role>\w*)\])?(\{(?P<tag>\w+)\})?")
_ROLE = re.compile(r"\[\w+\]")
_TAG = re.compile(r"\{\w+\}")


class Reading(Enum):
    """The effect of a field that has a value."""

    WORKS = "works"
    IGNORED = "ignored"
    """It has no effect, and `X-VLM-Ignored` names it."""
    REFUSED = "refused"


@dataclass(frozen=True)
class Field:
    """One field, and a `value` that shows how it is read.

    path: as `structs.paths_of` has it; the role of a message may stand in the brackets.
    on: what the rest of the body is, if it is not the dialect's usual one.
    of_answer: whether it changes the response, and nothing that the engine gets.
    neutral: values that ask for nothing, and are taken without a word.
    fails: the status if the field works, and the value shows it by being refused.
    named: what the header or the error says, if it is not the path.
    title: what `docs/fields.md` calls it, if it is not that.
    where: when it is read so, for `docs/fields.md`.
    """

    concept: str
    path: str
    value: Any
    reading: Reading = Reading.WORKS
    on: Body | None = None
    of_answer: bool = False
    neutral: tuple[Any, ...] = ()
    fails: int | None = None
    named: str = ""
    title: str = ""
    where: str = ""

    @property
    def declared(self) -> str:
        """The path as `structs.paths_of` writes it."""
        return _ROLE.sub("[]", self.path)

    @property
    def name(self) -> str:
        """The path as `X-VLM-Ignored` writes it."""
        return self.named or shown(self.path)


def works(concept: str, path: str, value: Any, **more: Any) -> Field:
    return Field(concept, path, value, **more)


def answers(concept: str, path: str, value: Any, **more: Any) -> Field:
    """A field whose effect is on the response."""
    return Field(concept, path, value, of_answer=True, **more)


def ignored(concept: str, path: str, value: Any, **more: Any) -> Field:
    return Field(concept, path, value, Reading.IGNORED, **more)


def refused(concept: str, path: str, value: Any, **more: Any) -> Field:
    return Field(concept, path, value, Reading.REFUSED, **more)


def unknown_in_messages(*places: tuple[str, Body | None]) -> tuple[Field, ...]:
    """An unknown field in each object of a path and a request, all of them ignored."""
    concept = "in messages, items, parts, calls and tools"
    return tuple(_unknown(concept, path, Reading.IGNORED, on) for path, on in places)


def unknown_elsewhere(
    reading: Reading, *places: tuple[str, Body | None], title: str = "any"
) -> tuple[Field, ...]:
    """The same for objects that are no part of a message."""
    return tuple(_unknown("in other objects", path, reading, on, title) for path, on in places)


def _unknown(
    concept: str, path: str, reading: Reading, on: Body | None, title: str = "any"
) -> Field:
    return Field(concept, f"{path}.colour", "red", reading, on, title=title)


@dataclass(frozen=True)
class Dialect:
    """The fields of one route.

    structs: what decode its requests. more: fields that are none of theirs and are known by name.
    counts: whether the prompt is only counted, so that nothing but the prompt matters.
    """

    title: str
    route: str
    structs: tuple[type[msgspec.Struct], ...]
    usual: Body
    fields: tuple[Field, ...]
    more: frozenset[str] = frozenset()
    script: tuple[Step, ...] = HELLO
    counts: bool = False

    def __str__(self) -> str:
        return self.title


Given = Callable[[httpx.AsyncClient], Awaitable[Any]]
"""A value that is known only once the server was asked."""


STORED = image_file("PNG")
STORED_NAME = f"sha256:{hashlib.sha256(STORED).hexdigest()}"
"""The name of bytes that every server of these tests has got."""


STORED_PDF = pdf.numbered(2)
STORED_PDF_NAME = f"sha256:{hashlib.sha256(STORED_PDF).hexdigest()}"


async def uploaded_pdf(client: httpx.AsyncClient) -> str:
    """The id of an uploaded document."""
    file = ("a.pdf", pdf.numbered(3))
    answer = await client.post("/v1/files", files={"file": file}, data={"purpose": "user_data"})
    return str(answer.json()["id"])


async def uploaded(client: httpx.AsyncClient) -> str:
    """The id of an uploaded image."""
    image = ("a.png", image_file("PNG", (11, 5)))
    answer = await client.post("/v1/files", files={"file": image}, data={"purpose": "vision"})
    return str(answer.json()["id"])


def shown(path: str) -> str:
    """`path` without tags and roles."""
    return _TAG.sub("", _ROLE.sub("[]", path))


def with_and_without(body: Mapping[str, Any], path: str, value: Any) -> tuple[Body, Body]:
    """`body` with `value` at `path`, and `body` with no or another value there.

    Both have the object that holds the field; in a list, the last element of the role and tag."""
    without = copy.deepcopy(dict(body))
    _holder(without, path)
    with_value = copy.deepcopy(without)
    _holder(with_value, path)[path.rpartition(".")[2]] = value
    return with_value, without


def has(body: Body, path: str) -> bool:
    """Whether `body` has a value at `path`."""
    return path.rpartition(".")[2] in _holder(copy.deepcopy(body), path)


def removed(body: Body, path: str) -> Body:
    """`body` without the value at `path`."""
    without = copy.deepcopy(body)
    _holder(without, path).pop(path.rpartition(".")[2], None)
    return without


def _holder(node: Body, path: str) -> Body:
    """The object or list that holds the field at `path`; missing objects on the way are created."""
    for step in map(_STEP.fullmatch, path.split(".")[:-1]):
        assert step is not None
        name, tag = step["name"], step["tag"]
        if step["list"] is None:
            node = node.setdefault(name, {"type": tag} if tag else {})
            assert tag is None or node["type"] == tag, (name, tag)
        else:
            node = [each for each in node[name] if _fits(each, step["role"], tag)][-1]
    return node


def _fits(element: Body, role: str | None, tag: str | None) -> bool:
    has_role = not role or element.get("role") == role
    return has_role and (tag is None or element.get("type") == tag)
