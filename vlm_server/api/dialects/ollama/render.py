"""Ollama's answers, made of the engine's events: one JSON object, or one on each line."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from vlm_server import protocol
from vlm_server.api.dialects.logprobs import TokenLogprob, token_logprob
from vlm_server.api.dialects.ollama.parse import AnswerOptions
from vlm_server.errors import RequestError

CONTENT_TYPE = b"application/x-ndjson"


class FunctionCall(msgspec.Struct, frozen=True):
    """`arguments` is an object, not its text."""

    index: int
    name: str
    arguments: dict[str, Any]


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    function: FunctionCall


class AnswerMessage(msgspec.Struct, frozen=True):
    role: str
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: tuple[ToolCall, ...] | UnsetType = UNSET


class Usage(msgspec.Struct, frozen=True):
    """Ours: the size at which the model saw each picture, and its tokens."""

    images: tuple[protocol.ImageUse, ...]


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """`message` is `/api/chat`'s, `response` and `thinking` `/api/generate`'s. What follows `done`
    is the last line's; durations are in nanoseconds."""

    model: str
    created_at: str
    message: AnswerMessage | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    logprobs: tuple[TokenLogprob, ...] | UnsetType = UNSET
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_cached_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET


class ErrorBody(msgspec.Struct, frozen=True):
    error: str


def encode_error(error: RequestError) -> bytes:
    """`error` as JSON, for the body of a response or a line of a stream.

    The field at fault is named in the text, since Ollama's errors have no other place for it.
    """
    text = error.message
    if error.param and error.param not in text:
        text = f"{text} (`{error.param}`)"
    return msgspec.json.encode(ErrorBody(text))


@dataclass(slots=True)
class Piece:
    """A part of an answer, or all of it."""

    text: str = ""
    thinking: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[protocol.TokenLogprob] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.thinking or self.calls or self.logprobs)


Show = Callable[[Line, Piece], Line]
"""A route's way to write a piece into a line."""


def as_message(line: Line, piece: Piece) -> Line:
    """`line` with `piece` as `/api/chat` has it."""
    message = AnswerMessage(
        "assistant", piece.text, piece.thinking or UNSET, tuple(piece.calls) or UNSET
    )
    return msgspec.structs.replace(line, message=message)


def as_response(line: Line, piece: Piece) -> Line:
    """`line` with `piece` as `/api/generate` has it."""
    return msgspec.structs.replace(line, response=piece.text, thinking=piece.thinking or UNSET)


class _Calls:
    """The call that is being written, if there is one."""

    def __init__(self) -> None:
        self._open: protocol.ToolCallDelta | None = None

    @property
    def is_open(self) -> bool:
        return self._open is not None

    def is_ended_by(self, delta: protocol.Delta) -> bool:
        """Whether another call or text begins."""
        if self._open is None:
            return False
        if delta.tool_call is None:
            return bool(delta.text)
        return delta.tool_call.index != self._open.index

    def add(self, more: protocol.ToolCallDelta) -> None:
        """More of the call, or its beginning."""
        begun = self._open or protocol.ToolCallDelta(more.index)
        self._open = protocol.ToolCallDelta(
            index=more.index,
            id=begun.id or more.id,
            name=begun.name or more.name,
            arguments=begun.arguments + more.arguments,
        )

    def take(self) -> Piece:
        """The call as a piece; as text if it broke off before its arguments were complete."""
        assert self._open is not None
        call, self._open = self._open, None
        try:
            arguments = _decode_object(call.arguments or "{}")
        except (msgspec.DecodeError, RecursionError):
            return Piece(text=call.arguments)
        return Piece(calls=[ToolCall(call.id, FunctionCall(call.index, call.name, arguments))])


@dataclass(slots=True)
class LineRenderer:
    """The JSON of one answer. A call is shown when it is complete: its arguments are an object."""

    options: AnswerOptions
    show: Show
    _calls: _Calls = field(default_factory=_Calls)
    _done_reason: str = ""

    def whole(
        self, choices: Sequence[Sequence[protocol.Delta]], finished: protocol.Finished
    ) -> bytes:
        answer = Piece()
        for delta in choices[0]:
            for piece in self._pieces(delta):
                answer.text += piece.text
                answer.thinking += piece.thinking
                answer.calls += piece.calls
                answer.logprobs += piece.logprobs
        return self._last(answer, finished)

    def delta(self, delta: protocol.Delta) -> bytes:
        """Lines of what `delta` completes."""
        lines = (self._line(piece, done=False) for piece in self._pieces(delta) if piece)
        return b"".join(line + b"\n" for line in lines)

    def end(self, finished: protocol.Finished) -> bytes:
        """The last line, with reason, counts and durations."""
        return self._last(Piece(), finished) + b"\n"

    def error(self, error: RequestError) -> bytes:
        """A line with the error, which is the last."""
        return encode_error(error) + b"\n"

    def keep_alive(self) -> bytes:
        """An empty line of the answer: JSON lines have no comments, and clients add up texts."""
        return self.empty_chunk()

    def empty_chunk(self) -> bytes:
        return self._line(Piece(), done=False) + b"\n"

    def _pieces(self, delta: protocol.Delta) -> list[Piece]:
        """The pieces of `delta`, in order: first a call that it completes."""
        pieces = []
        if self._calls.is_ended_by(delta):
            pieces.append(self._calls.take())
        if delta.tool_call is not None:
            self._calls.add(delta.tool_call)
        if delta.is_reasoning:
            pieces.append(Piece(thinking=delta.text, logprobs=list(delta.logprobs)))
        else:
            pieces.append(Piece(text=delta.text, logprobs=list(delta.logprobs)))
        if delta.finish_reason:
            self._done_reason = "length" if delta.finish_reason == "length" else "stop"
            if self._calls.is_open:
                pieces.append(self._calls.take())
        return pieces

    def _last(self, piece: Piece, finished: protocol.Finished) -> bytes:
        if self.options.done_reason:
            return self._line(piece, done=True, done_reason=self.options.done_reason)
        return self._line(
            piece,
            done=True,
            done_reason=self._done_reason,
            usage=_usage_of(finished),
            **_measures(finished),
        )

    def _line(self, piece: Piece, **fields: Any) -> bytes:
        scores = tuple(token_logprob(each, empty_top=False) for each in piece.logprobs)
        line = Line(
            model=self.options.model,
            created_at=time_text(time.time()),
            logprobs=scores or UNSET,
            **fields,
        )
        return _encode(self.show(line, piece))


_encode = msgspec.json.Encoder().encode
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


def time_text(seconds: float) -> str:
    """Seconds since 1970 as Ollama writes times."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _measures(finished: protocol.Finished) -> dict[str, int]:
    """Counts, and durations in nanoseconds. A load is not told apart.

    The prompt's duration is the time to the first text, its wait for the device included.
    """
    usage, times = finished.usage, finished.times
    return {
        "total_duration": _nanoseconds(times.total_seconds),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_cached_count": usage.cached_tokens,
        "prompt_eval_duration": _nanoseconds(times.first_text_seconds),
        "eval_count": usage.completion_tokens,
        "eval_duration": _nanoseconds(times.total_seconds - times.first_text_seconds),
    }


def _usage_of(finished: protocol.Finished) -> Usage | UnsetType:
    """Left out without pictures."""
    return Usage(finished.images) if finished.images else UNSET


def _nanoseconds(seconds: float) -> int:
    """Nanoseconds, at least 1: clients divide by them."""
    return max(1, round(seconds * 1e9))
