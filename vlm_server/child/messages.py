"""Messages between a pool and its processes: a length, a flag, and that many bytes."""

from __future__ import annotations

import struct
from typing import BinaryIO

Data = bytes | bytearray | memoryview

_HEADER = struct.Struct(">Q?")


def write(pipe: BinaryIO, *parts: Data, flag: bool = False) -> None:
    """Write `parts` as one message. Raises OSError if nobody reads it."""
    pipe.write(_HEADER.pack(sum(map(len, parts)), flag))
    for part in parts:
        pipe.write(part)
    pipe.flush()


def read(pipe: BinaryIO) -> tuple[bytearray, bool]:
    """The next message and its flag. Raises EOFError if the pipe ends before the message does."""
    length, flag = _HEADER.unpack(_exactly(pipe, _HEADER.size))
    return _exactly(pipe, length), flag


def _exactly(pipe: BinaryIO, size: int) -> bytearray:
    data = bytearray(size)
    filled = 0
    with memoryview(data) as view:
        while filled < size:
            count = pipe.readinto(view[filled:])  # type: ignore[attr-defined]
            if not count:
                raise EOFError
            filled += count
    return data
