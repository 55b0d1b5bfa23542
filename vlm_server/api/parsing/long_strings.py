"""Keeps the base64 of images out of what is parsed as JSON.

Parsing takes longer for a string than all that is done with the image in it. What is set aside is
nothing but base64, perhaps behind the beginning of a data URL, so that what is parsed and put
together again equals what parsing all of it gives.
"""

from __future__ import annotations

import binascii
import secrets
from dataclasses import dataclass, field
from typing import Any

import pybase64

Body = bytes | bytearray

LEAST_BYTES = 64 << 10
"""Of a string that is set aside."""
_MOST_QUOTES = 100_000
"""In a body, with those in strings. Looking at each takes about a microsecond."""
_MAX_HEADER_BYTES = 256
_MAX_BACKSLASHES = 64

_MARK = secrets.token_hex(16)
"""What stands for a string is this and its number: no client can know it."""


@dataclass(slots=True)
class Cut:
    """JSON without its long strings, and those."""

    json: bytes = b""
    strings: list[str] = field(default_factory=list)

    def restored(self, value: Any) -> Any:
        """`value`, which was parsed from `json`, with the strings in their places.

        Raises ValueError if one is the name of a field.
        """
        if isinstance(value, str):
            return self._string(value) if value.startswith(_MARK) else value
        if isinstance(value, list):
            value[:] = map(self.restored, value)
        elif isinstance(value, dict):
            for name, each in value.items():
                if name.startswith(_MARK):
                    raise ValueError("the name of a field was set aside")
                if isinstance(each, str | list | dict):
                    value[name] = self.restored(each)
        return value

    def _string(self, mark: str) -> str:
        return self.strings[int(mark.removeprefix(_MARK))]


def cut(body: Body) -> Cut | None:
    """`body` without its long strings of base64; None if it has none, or has too many others."""
    found = Cut()
    pieces = list[Body]()
    begin = end = 0
    num_quotes = 0
    while start := body.find(b'"', end) + 1:
        end, num_inside = _end_of_string(body, start, _MOST_QUOTES - num_quotes)
        num_quotes += num_inside + 2
        if not end:
            return None
        if end - start > LEAST_BYTES and (text := _base64(body[start : end - 1])) is not None:
            pieces += [body[begin:start], f"{_MARK}{len(found.strings)}".encode()]
            found.strings.append(text)
            begin = end - 1
    if not found.strings:
        return None
    found.json = b"".join([*pieces, body[begin:]])
    return found


def _end_of_string(body: Body, start: int, most: int) -> tuple[int, int]:
    """What is after the quote that ends the string from `start` on, and how many quotes are in it.

    0 in place of the end if that was not found among `most` quotes.
    """
    end = start - 1
    for num_inside in range(most):
        end = body.find(b'"', end + 1)
        before = body[max(start, end - _MAX_BACKSLASHES) : max(start, end)]
        num_backslashes = len(before) - len(before.rstrip(b"\\"))
        if end < 0 or num_backslashes == _MAX_BACKSLASHES:
            break
        if num_backslashes % 2 == 0:
            return end + 1, num_inside
    return 0, most


def _base64(content: Body) -> str | None:
    """`content` as text, if it is valid base64 or a data URL of some."""
    comma = content.find(b",", 0, _MAX_HEADER_BYTES)
    header = bytes(content[: comma + 1])
    if not header.isascii() or b"\\" in header or not header.decode("ascii").isprintable():
        return None
    try:
        pybase64.b64decode(memoryview(content)[comma + 1 :], validate=True)
    except binascii.Error:
        return None
    return content.decode("ascii")
