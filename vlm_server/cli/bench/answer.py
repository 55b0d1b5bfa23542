"""One answer and what it tells about time. Knows chat chunks and when their bytes came."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import msgspec

from vlm_server.cli.bench.sse import EventReader

_MAX_ERROR_CHARS = 300


class _Delta(msgspec.Struct):
    """`reasoning_content` and `reasoning` are two names for the text that comes before."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What one request got. All times are seconds since it was sent.

    `arrivals` has one entry for each delta with text; deltas that came in one piece share a
    time. Token counts are the server's own, None where it gave none.
    """

    text: str = ""
    arrivals: tuple[float, ...] = ()
    total_seconds: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds until the first text; None if there was none, or the answer failed."""
        return self.arrivals[0] if self.arrivals and self.error is None else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between each delta with text and the next."""
        return [after - before for before, after in pairwise(self.arrivals)]


def failed(reason: str, total_seconds: float = 0.0) -> Answer:
    """The answer to a request that got none."""
    return Answer(error=reason[:_MAX_ERROR_CHARS], total_seconds=total_seconds)


def read_answer(pieces: Iterable[tuple[float, bytes]], total_seconds: float) -> Answer:
    """The answer in a stream's `pieces`, each with the time it came; a broken one is an error."""
    reader = EventReader()
    reading = _Reading()
    for time, piece in pieces:
        for data in reader.feed(piece):
            reading.take(time, data)
    return reading.answer(total_seconds)


class _Reading:
    """What the events of one stream have said so far."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._arrivals: list[float] = []
        self._usage = _Usage()
        self._errors: list[str] = []
        self._ended = False

    def take(self, time: float, data: bytes) -> None:
        if data == b"[DONE]":
            self._ended = True
            return
        try:
            chunk = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._errors.append(f"an event that is no chat chunk: {error}")
            return
        if text := _text(chunk):
            self._texts.append(text)
            self._arrivals.append(time)
        self._usage = chunk.usage or self._usage
        if chunk.error is not None:
            self._errors.append(msgspec.json.encode(chunk.error).decode())

    def answer(self, total_seconds: float) -> Answer:
        if not self._ended:
            self._errors.append("the stream ended before [DONE]")
        details = self._usage.prompt_tokens_details
        return Answer(
            text="".join(self._texts),
            arrivals=tuple(self._arrivals),
            total_seconds=total_seconds,
            prompt_tokens=self._usage.prompt_tokens,
            cached_tokens=details.cached_tokens if details else None,
            completion_tokens=self._usage.completion_tokens,
            error=self._errors[0][:_MAX_ERROR_CHARS] if self._errors else None,
        )


def _text(chunk: _Chunk) -> str | None:
    delta = chunk.choices[0].delta if chunk.choices else None
    return (delta.content or delta.reasoning_content or delta.reasoning) if delta else None
