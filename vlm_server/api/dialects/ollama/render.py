"""Ollama's answers, made of the engine's events: one JSON object, or one on each line."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from vlm_server.api.dialects.ollama.parse import Options
from vlm_server.api.http.answer import token_logprob
from vlm_server.errors import RequestError
from vlm_server.protocol import Delta, Finished, ToolCallDelta

CONTENT_TYPE = b"application/x-ndjson"

_encode = msgspec.json.Encoder().encode
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


def encode_error(error: RequestError) -> bytes:
    """`error` as JSON, for the body of a response or a line of a stream.

    The field at fault is named in the text, since Ollama's errors have no other place for it.
    """
    text = error.message
    if error.param and error.param not in text:
        text = f"{text} (`{error.param}`)"
    return _encode({"error": text})


@dataclass(slots=True)
class AnswerPart:
    """A part of an answer, or all of it. `calls` and `logprobs` are JSON."""

    text: str = ""
    thinking: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.thinking or self.calls or self.logprobs)

    def add(self, part: AnswerPart) -> None:
        """Append `part`, which comes next in the answer."""
        self.text += part.text
        self.thinking += part.thinking
        self.calls += part.calls
        self.logprobs += part.logprobs


def chat_fields(part: AnswerPart) -> dict[str, Any]:
    """The fields of `part` in an answer of `/api/chat`."""
    message: dict[str, Any] = {"role": "assistant", "content": part.text}
    if part.thinking:
        message["thinking"] = part.thinking
    if part.calls:
        message["tool_calls"] = part.calls
    return {"message": message}


def generate_fields(part: AnswerPart) -> dict[str, Any]:
    """The fields of `part` in an answer of `/api/generate`."""
    thinking = {"thinking": part.thinking} if part.thinking else {}
    return {"response": part.text, **thinking}


class LineRenderer:
    """The JSON of one answer. A call is sent when complete: its arguments are an object.

    `fields_of` returns the fields of a part in the route's form.
    """

    def __init__(
        self,
        fields_of: Callable[[AnswerPart], dict[str, Any]],
        request_id: str,
        model: str,
        options: bytes,
    ) -> None:
        self._fields_of = fields_of
        self._options = msgspec.msgpack.decode(options, type=Options)
        self._call: ToolCallDelta | None = None
        """The call in progress, if any."""
        self._done_reason = ""

    def whole(self, choices: Sequence[Sequence[Delta]], finished: Finished) -> bytes:
        answer = AnswerPart()
        for delta in choices[0]:
            for part in self._parts(delta):
                answer.add(part)
        return self._last(answer, finished)

    def delta(self, delta: Delta) -> bytes:
        """The lines that `delta` completes."""
        lines = (self._line(part, done=False) for part in self._parts(delta) if part)
        return b"".join(line + b"\n" for line in lines)

    def end(self, finished: Finished) -> bytes:
        """The last line, with reason, counts and durations."""
        return self._last(AnswerPart(), finished) + b"\n"

    def error(self, error: RequestError) -> bytes:
        """A line with the error, which is the last."""
        return encode_error(error) + b"\n"

    def keep_alive(self) -> bytes:
        """An empty line of the answer: JSON lines have no comments, and clients add up texts."""
        return self.empty_chunk()

    def empty_chunk(self) -> bytes:
        return self._line(AnswerPart(), done=False) + b"\n"

    # ---- parts -------------------------------------------------------------------------

    def _parts(self, delta: Delta) -> list[AnswerPart]:
        """The parts of `delta`, in order: first a call that it completes."""
        parts = list[AnswerPart]()
        call_delta = delta.tool_call
        if self._call and (
            delta.text if call_delta is None else call_delta.index != self._call.index
        ):
            parts.append(self._end_call(self._call))
        if call_delta is not None:
            open_call = self._call or ToolCallDelta(
                call_delta.index, call_delta.id, call_delta.name
            )
            arguments = open_call.arguments + call_delta.arguments
            self._call = msgspec.structs.replace(open_call, arguments=arguments)
        text, thinking = ("", delta.text) if delta.is_reasoning else (delta.text, "")
        scores = [token_logprob(entry, empty_top=False) for entry in delta.logprobs]
        parts.append(AnswerPart(text, thinking, logprobs=scores))
        if delta.finish_reason:
            self._done_reason = "length" if delta.finish_reason == "length" else "stop"
            if self._call:
                parts.append(self._end_call(self._call))
        return parts

    def _end_call(self, call: ToolCallDelta) -> AnswerPart:
        """The call as a part; as text if its arguments are incomplete."""
        self._call = None
        try:
            arguments = _decode_object(call.arguments or "{}")
        except (msgspec.DecodeError, RecursionError):
            return AnswerPart(call.arguments)
        function = {"index": call.index, "name": call.name, "arguments": arguments}
        return AnswerPart(calls=[{"id": call.id, "function": function}])

    # ---- lines -------------------------------------------------------------------------

    def _last(self, part: AnswerPart, finished: Finished) -> bytes:
        if self._options.done_reason:
            return self._line(part, done=True, done_reason=self._options.done_reason)
        usage = {"usage": {"images": finished.images}} if finished.images else {}
        measures = _measures(finished)
        return self._line(part, done=True, done_reason=self._done_reason, **measures, **usage)

    def _line(self, part: AnswerPart, **fields: Any) -> bytes:
        line = {"model": self._options.model, "created_at": time_text(time.time())}
        scores = {"logprobs": part.logprobs} if part.logprobs else {}
        return _encode({**line, **self._fields_of(part), **scores, **fields})


def time_text(seconds: float) -> str:
    """Seconds since 1970 in Ollama's form of times."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _measures(finished: Finished) -> dict[str, int]:
    """Counts, and durations in nanoseconds. `load_duration` is 0: the others include loading.

    The prompt's duration is the time to the first text, including the wait for the device.
    """
    usage, times = finished.usage, finished.times
    return {
        "total_duration": nanoseconds(times.total_seconds),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_cached_count": usage.cached_tokens,
        "prompt_eval_duration": nanoseconds(times.first_text_seconds),
        "eval_count": usage.completion_tokens,
        "eval_duration": nanoseconds(times.total_seconds - times.first_text_seconds),
    }


def nanoseconds(seconds: float) -> int:
    """Nanoseconds, at least 1: clients divide by them."""
    return max(1, round(seconds * 1e9))
