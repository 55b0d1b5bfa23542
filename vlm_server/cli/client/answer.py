"""Streamed chat completions, parsed: text and its times of arrival, token counts, errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import msgspec

_MAX_ERROR_CHARS = 300
_PROGRESS = b": progress "
STATE_WORDS = {
    "reading": "receiving",
    "waiting_for_model": "loading the model",
    "sent": "waiting for its turn",
    "waiting": "waiting for its turn",
    "preparing": "preparing",
    "waiting_for_memory": "waiting for memory",
    "reading_disk": "reading the cache on disk",
    "encoding": "looking at the pictures",
    "prefill": "reading",
    "decode": "answering",
}
"""What people read while a request is in a state: docs/status.md."""


class AnswerProgress(msgspec.Struct, frozen=True):
    """What a request waits for, as its server's comments say: docs/streams.md, `X-VLM-Progress`."""

    state: str = ""
    done: int = 0
    total: int = 0
    stage: str = ""
    fraction: float = 0.0


class EventReader:
    """The reader of server-sent events: turns bytes into the `data` of complete events.

    `progress` is what the last comment on it said, if there was one.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self.progress: AnswerProgress | None = None

    def feed(self, received: bytes) -> list[bytes]:
        """The events that `received` completes, without comments and fields other than `data`."""
        lines = (self._rest + received).split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif line.startswith(_PROGRESS):
                with contextlib.suppress(msgspec.DecodeError):  # the comment of another server
                    self.progress = _decode_progress(line.removeprefix(_PROGRESS))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


class MessageDelta(msgspec.Struct):
    """The part of a message; `reasoning` is other servers' name of `reasoning_content`."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChunkChoice(msgspec.Struct):
    delta: MessageDelta | None = None
    finish_reason: str | None = None


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class AnswerUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptTokensDetails | None = None
    images: Any = None
    """Our extension; of any shape, since another server may use the name."""

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that were not computed again; None if the server does not say."""
        details = self.prompt_tokens_details
        return details.cached_tokens if details else None

    @property
    def last_seen(self) -> tuple[int, int] | None:
        """The width and height in pixels of the last image as the model saw it."""
        match self.images:
            case [*_, {"width": int(width), "height": int(height)}]:
                return width, height
        return None


class Chunk(msgspec.Struct):
    """One event of a stream. `error` is JSON of any shape; most servers send an object."""

    choices: tuple[ChunkChoice, ...] = ()
    usage: AnswerUsage | None = None
    error: Any = None

    @property
    def content(self) -> str:
        """The text of all choices, without reasoning."""
        return "".join((choice.delta and choice.delta.content) or "" for choice in self.choices)

    @property
    def reasoning(self) -> str:
        """The reasoning of all choices."""
        deltas = [choice.delta for choice in self.choices if choice.delta is not None]
        return "".join(delta.reasoning_content or delta.reasoning or "" for delta in deltas)

    @property
    def finish_reason(self) -> str | None:
        """Reason why the first choice ended, in its last chunk."""
        return self.choices[0].finish_reason if self.choices else None


_decode = msgspec.json.Decoder(Chunk).decode
_decode_progress = msgspec.json.Decoder(AnswerProgress).decode


class ChunkReader:
    """The reader of a stream's chunks. `has_ended` is whether `[DONE]` has come."""

    def __init__(self) -> None:
        self._events = EventReader()
        self.has_ended = False

    @property
    def progress(self) -> AnswerProgress | None:
        """The last that the server said of its progress."""
        return self._events.progress

    def feed(self, received: bytes) -> list[Chunk]:
        """The chunks that `received` completes; other events become chunks with an error."""
        chunks = []
        for data in self._events.feed(received):
            if data == b"[DONE]":
                self.has_ended = True
                continue
            try:
                chunks.append(_decode(data))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                chunks.append(Chunk(error=f"an event is not a chat completion chunk: {error}"))
        return chunks


class TimedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one request. Times are seconds since it was sent.

    `arrivals` has an entry for each delta with text. Token counts are None if the server gave none.
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


def failed_answer(reason: str, total_seconds: float) -> TimedAnswer:
    """The result of a request without an answer."""
    return TimedAnswer(error=reason[:_MAX_ERROR_CHARS], total_seconds=total_seconds)


def read_answer(received: Iterable[tuple[float, bytes]], total_seconds: float) -> TimedAnswer:
    """The answer in the (seconds, bytes) that were `received`. A broken stream gives an error."""
    reader = ChunkReader()
    texts: list[str] = []
    arrivals: list[float] = []
    errors: list[str] = []
    usage = AnswerUsage()
    for seconds, data in received:
        for chunk in reader.feed(data):
            if text := chunk.content or chunk.reasoning:
                texts.append(text)
                arrivals.append(seconds)
            usage = chunk.usage or usage
            if chunk.error is not None:
                told = chunk.error
                errors.append(told if isinstance(told, str) else msgspec.json.encode(told).decode())
    if not reader.has_ended:
        errors.append("the stream ended before [DONE]")
    return TimedAnswer(
        text="".join(texts),
        arrivals=tuple(arrivals),
        total_seconds=total_seconds,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        error=errors[0][:_MAX_ERROR_CHARS] if errors else None,
    )


def error_message(error: Any) -> str:
    """The message in an error of OpenAI's shape; all of an error of another shape."""
    return str(error["message"]) if isinstance(error, dict) and "message" in error else str(error)
