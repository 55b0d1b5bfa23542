"""Messages between a pool and its processes: a length, a flag, and that many bytes.

An answer with much data ends with a description of it, so that the data are never copied to
one place before they are sent.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

_HEADER = struct.Struct(">Q?")
_LENGTH = struct.Struct(">I")


class PipeWriter(Protocol):
    """The writing end of a pipe."""

    def write(self, data: bytes | bytearray | memoryview, /) -> object: ...
    def flush(self) -> object: ...


class PipeReader(Protocol):
    """The reading end of a pipe."""

    def readinto(self, buffer: memoryview, /) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """A message of `size` bytes that is made while it is sent."""

    size: int
    parts: Iterable[bytes | bytearray]


Body = bytes | bytearray | memoryview | Parts


def write(pipe: PipeWriter, body: Body, *, flag: bool = False) -> None:
    """Write one message. Raises OSError if the reader is gone."""
    size, parts = (body.size, body.parts) if isinstance(body, Parts) else (len(body), [body])
    pipe.write(_HEADER.pack(size, flag))
    for part in parts:
        pipe.write(part)
    pipe.flush()


def pack(body: bytes, *, flag: bool = False) -> bytes:
    """One message as bytes."""
    return _HEADER.pack(len(body), flag) + body


def parse(received: bytes | bytearray) -> tuple[bytes, bool, int] | None:
    """The first message in `received`, its flag and all of its size; None if it is not whole."""
    if len(received) < _HEADER.size:
        return None
    length, flag = _HEADER.unpack_from(received)
    size = _HEADER.size + length
    return None if len(received) < size else (bytes(received[_HEADER.size : size]), flag, size)


def read(pipe: PipeReader) -> tuple[bytearray, bool]:
    """The next message and its flag. Raises EOFError if the pipe ends before the message does."""
    length, flag = _HEADER.unpack(_exactly(pipe, _HEADER.size))
    return _exactly(pipe, length), flag


def describe(size: int, data: Iterable[bytes | bytearray], description: bytes) -> Parts:
    """`data`, of `size` bytes in all, followed by its description."""
    last = description + _LENGTH.pack(len(description))
    return Parts(size + len(last), chain(data, [last]))


def split(answer: bytearray) -> tuple[memoryview, memoryview]:
    """The data and the description. Raises ValueError if `answer` has none."""
    view, end = memoryview(answer), len(answer) - _LENGTH.size
    if end < 0 or (length := _LENGTH.unpack_from(answer, end)[0]) > end:
        raise ValueError("an answer without a description")
    return view[: end - length], view[end - length : end]


def _exactly(pipe: PipeReader, size: int) -> bytearray:
    data = bytearray(size)
    filled = 0
    with memoryview(data) as view:
        while filled < size:
            count = pipe.readinto(view[filled:])
            if not count:
                raise EOFError
            filled += count
    return data
