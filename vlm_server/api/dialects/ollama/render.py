"""Renders the engine's events as Ollama's answers: one JSON object, or one on each line."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET

from vlm_server import protocol
from vlm_server.api.dialects.ollama import errors
from vlm_server.api.dialects.ollama.answers import (
    AnswerMessage,
    FunctionCall,
    Line,
    ToolCall,
    measures,
    scored,
    time_text,
    usage_of,
)
from vlm_server.api.dialects.ollama.options import AnswerOptions
from vlm_server.errors import RequestError

CONTENT_TYPE = b"application/x-ndjson"


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
"""How a route writes a piece into a line."""


def as_message(line: Line, piece: Piece) -> Line:
    """As `/api/chat` does."""
    message = AnswerMessage(
        "assistant", piece.text, piece.thinking or UNSET, tuple(piece.calls) or UNSET
    )
    return msgspec.structs.replace(line, message=message)


def as_response(line: Line, piece: Piece) -> Line:
    """As `/api/generate` does."""
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
        """The whole answer."""
        answer = Piece()
        for delta in choices[0]:
            for piece in self._pieces(delta):
                answer.text += piece.text
                answer.thinking += piece.thinking
                answer.calls += piece.calls
                answer.logprobs += piece.logprobs
        return self._last(answer, finished)

    def delta(self, delta: protocol.Delta) -> bytes:
        """A line for what became complete."""
        lines = (self._line(piece, done=False) for piece in self._pieces(delta) if piece)
        return b"".join(line + b"\n" for line in lines)

    def end(self, finished: protocol.Finished) -> bytes:
        """The last line, with reason, counts and durations."""
        return self._last(Piece(), finished) + b"\n"

    def error(self, error: RequestError) -> bytes:
        """A line with the error, which is the last."""
        return errors.encode(error) + b"\n"

    def keep_alive(self) -> bytes:
        """A line that says nothing: readers of lines have no comments, but add up texts."""
        return self.empty_chunk()

    def empty_chunk(self) -> bytes:
        return self._line(Piece(), done=False) + b"\n"

    def _pieces(self, delta: protocol.Delta) -> list[Piece]:
        """What is to be shown at a delta, in order: first a call that it completes."""
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
            usage=usage_of(finished),
            **measures(finished),
        )

    def _line(self, piece: Piece, **fields: Any) -> bytes:
        line = Line(
            model=self.options.model,
            created_at=time_text(time.time()),
            logprobs=scored(piece.logprobs),
            **fields,
        )
        return _encode(self.show(line, piece))


_encode = msgspec.json.Encoder().encode
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
