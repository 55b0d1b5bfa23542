"""Messages between a pool and its processes: a length, a flag, and that many bytes."""

from __future__ import annotations

import struct
from typing import BinaryIO

_HEADER = struct.Struct(">Q?")


def write(pipe: BinaryIO, body: bytes | bytearray | memoryview, *, flag: bool = False) -> None:
    """Write one message. Raises OSError if nobody reads it."""
    pipe.write(_HEADER.pack(len(body), flag))
    pipe.write(body)
    pipe.flush()


def packed(body: bytes, *, flag: bool = False) -> bytes:
    """One message, for who sends it otherwise than by `write`."""
    return _HEADER.pack(len(body), flag) + body


def parsed(received: bytes | bytearray) -> tuple[bytes, bool, int] | None:
    """The first message in `received`, its flag and all of its size; None if it is not whole."""
    if len(received) < _HEADER.size:
        return None
    length, flag = _HEADER.unpack_from(received)
    size = _HEADER.size + length
    return None if len(received) < size else (bytes(received[_HEADER.size : size]), flag, size)


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
