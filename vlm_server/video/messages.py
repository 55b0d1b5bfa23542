"""The messages between a preparer thread and the process that decodes a video.

A message is a 4-byte big-endian length and that many bytes of msgpack. The process reads one
`Job` and writes `Frame`s in order of time, then `Done`, or `Refused` instead of the rest.
"""

from __future__ import annotations

import struct
from typing import BinaryIO

import msgspec

from vlm_server import settings

_LENGTH = struct.Struct(">I")


class Job(msgspec.Struct, frozen=True, tag="job"):
    """Decode `data`, which is in container `format`: MP4, WEBM or GIF."""

    data: bytes
    format: str
    limits: settings.Video


class Frame(msgspec.Struct, frozen=True, tag="frame"):
    """The frame shown `seconds` after the first one: `rgb` is (height, width, 3) bytes.

    To be rotated counterclockwise by `quarter_turns` times 90 degrees.
    """

    seconds: float
    width: int
    height: int
    quarter_turns: int
    rgb: bytes


class Done(msgspec.Struct, frozen=True, tag="done"):
    """That was the last frame."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The video can't be decoded; `reason` is for the client."""

    reason: str


Answer = Frame | Done | Refused

_encoder = msgspec.msgpack.Encoder()
_job_decoder = msgspec.msgpack.Decoder(Job)
_answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def write(pipe: BinaryIO, message: Job | Answer) -> None:
    body = _encoder.encode(message)
    pipe.write(_LENGTH.pack(len(body)))
    pipe.write(body)
    pipe.flush()


def read_job(pipe: BinaryIO) -> Job:
    """Raises EOFError if the pipe ends before the message does."""
    return _job_decoder.decode(_read(pipe))


def read_answer(pipe: BinaryIO) -> Answer:
    """Raises EOFError if the pipe ends before the message does."""
    return _answer_decoder.decode(_read(pipe))


def _read(pipe: BinaryIO) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(pipe, _LENGTH.size))
    return _exactly(pipe, length)


def _exactly(pipe: BinaryIO, size: int) -> bytes:
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return data
