"""Anthropic's messages and their events, made of the engine's events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Literal

import msgspec

from vlm_server.api.dialects.anthropic import errors
from vlm_server.api.dialects.anthropic.citations import CitationParser, Segment
from vlm_server.api.dialects.anthropic.parse import Options
from vlm_server.api.dialects.anthropic.schema import SIGNATURE
from vlm_server.api.http.streams import sse
from vlm_server.errors import RequestError
from vlm_server.protocol import Delta, Finished, FinishReason

_PING = sse.event(b'{"type":"ping"}', "ping")
_STOP_REASONS: dict[FinishReason, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}
_BlockKind = Literal["text", "thinking", "tool_use"]
_BlockKey = tuple[_BlockKind, int]
"""A block's kind, and the number of its tool call, or -1."""
_TEXT: _BlockKey = ("text", -1)
_DELTA_FIELDS: dict[_BlockKind, tuple[str, str]] = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""The type of a block's deltas, and the field with their content."""

_encode = msgspec.json.Encoder().encode


class MessageRenderer:
    """The JSON of one answer: a whole message, or its events. A stream keeps no text."""

    def __init__(self, request_id: str, model: str, options: bytes) -> None:
        self._id = request_id
        self._model = model
        decoded = msgspec.msgpack.decode(options, type=Options)
        self._shows_reasoning = decoded.shows_reasoning
        self._citations = CitationParser(decoded.cited)
        self._is_begun = False
        self._open: _BlockKey | None = None
        self._index = -1
        """The number of the last block."""
        self._ending: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}

    def whole(self, choices: Sequence[Sequence[Delta]], finished: Finished) -> bytes:
        (deltas,) = choices
        self._ending = _ending(deltas[-1])
        blocks = [list(block) for _, block in groupby(filter(_has_content, deltas), _block_key)]
        content = [block for deltas in blocks for block in self._whole_blocks(deltas)]
        return _encode(self._message(content, _usage(finished)))

    def delta(self, delta: Delta) -> bytes:
        """The events of `delta`, and of the blocks that begin and end with it."""
        events = self._begin()
        if _has_content(delta):
            key = _block_key(delta)
            if key != _TEXT:
                events += self._end_text()
                events += self._open_block(key, delta)
                events += self._add(key[0], self._piece(delta))
            else:
                events += self._add_segments(self._citations.feed(delta.text))
        if delta.finish_reason:
            events += self._end_text() + self._close_block()
            self._ending = _ending(delta)
        return events

    def end(self, finished: Finished) -> bytes:
        """The stop reason, the usage, and the last event."""
        end = _event("message_delta", delta=self._ending, usage=_usage(finished))
        return end + _event("message_stop")

    def error(self, error: RequestError) -> bytes:
        """An event with the error, and no `message_stop`."""
        return sse.event(errors.encode(error), "error")

    def keep_alive(self) -> bytes:
        return _PING

    def empty_chunk(self) -> bytes:
        return _PING

    def _begin(self) -> bytes:
        """The first event, once. Its usage is 0: nothing is counted yet."""
        if self._is_begun:
            return b""
        self._is_begun = True
        return _event("message_start", message=self._message([], _token_counts(0, 0, 0)))

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "type": "message",
            "id": self._id,
            "model": self._model,
            "content": content,
            **self._ending,
            "usage": usage,
            "role": "assistant",
        }

    def _whole_blocks(self, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
        """The blocks of consecutive deltas of one kind: several, if there are citations."""
        text = "".join(map(self._piece, deltas))
        if _block_key(deltas[0]) != _TEXT:
            return [_block(deltas[0], text, SIGNATURE)]
        segments = [*self._citations.feed(text), *self._citations.flush()]
        blocks: list[dict[str, Any]] = []
        for segment in _joined(segments):
            cited = {"citations": [segment.citation]} if segment.citation else {}
            blocks.append({"type": "text", "text": segment.text} | cited)
        return blocks

    def _add_segments(self, segments: Sequence[Segment]) -> bytes:
        """Events that add `segments` to the answer's text: a block ends with a citation."""
        events = b""
        for segment in segments:
            events += self._open_block(_TEXT) + self._add("text", segment.text)
            if segment.citation is not None:
                change = {"type": "citations_delta", "citation": segment.citation}
                events += self._block_event("delta", delta=change) + self._close_block()
        return events

    def _end_text(self) -> bytes:
        """Events with the text that was held back."""
        return self._add_segments(self._citations.flush())

    def _open_block(self, key: _BlockKey, first_delta: Delta | None = None) -> bytes:
        """The first event of a block, after the end of the open one; nothing if it is open."""
        if key == self._open:
            return b""
        events = self._close_block()
        self._open = key
        self._index += 1
        block = {"type": "text", "text": ""} if first_delta is None else _block(first_delta)
        return events + self._block_event("start", content_block=block)

    def _add(self, kind: _BlockKind, piece: str) -> bytes:
        if not piece:
            return b""
        name, field = _DELTA_FIELDS[kind]
        return self._block_event("delta", delta={"type": name, field: piece})

    def _close_block(self) -> bytes:
        """The last events of the open block, if there is one."""
        if self._open is None:
            return b""
        events = b""
        if self._open[0] == "thinking":
            signature = {"type": "signature_delta", "signature": SIGNATURE}
            events = self._block_event("delta", delta=signature)
        self._open = None
        return events + self._block_event("stop")

    def _block_event(self, name: str, **fields: Any) -> bytes:
        return _event(f"content_block_{name}", index=self._index, **fields)

    def _piece(self, delta: Delta) -> str:
        """The text or arguments that `delta` adds to its block."""
        if delta.tool_call is not None:
            return delta.tool_call.arguments
        return "" if delta.is_reasoning and not self._shows_reasoning else delta.text


def encode_count(finished: Finished) -> bytes:
    """The JSON of a prompt's token count, cached tokens included."""
    return _encode({"input_tokens": finished.usage.prompt_tokens})


def _event(name: str, **fields: Any) -> bytes:
    return sse.event(_encode({"type": name, **fields}), name)


def _has_content(delta: Delta) -> bool:
    """Whether `delta` belongs to a block."""
    return bool(delta.text) or delta.tool_call is not None


def _joined(segments: Sequence[Segment]) -> list[Segment]:
    """`segments`, each text without a citation joined to the one after it."""
    joined: list[Segment] = []
    for segment in segments:
        if joined and joined[-1].citation is None:
            segment = Segment(joined.pop().text + segment.text, segment.citation)
        joined.append(segment)
    return joined


def _block_key(delta: Delta) -> _BlockKey:
    if delta.tool_call is not None:
        return "tool_use", delta.tool_call.index
    return ("thinking" if delta.is_reasoning else "text"), -1


def _block(first_delta: Delta, text: str = "", signature: str = "") -> dict[str, Any]:
    """The block that `first_delta` begins, with its text; without text for a stream.

    Truncated arguments are left out.
    """
    if (call := first_delta.tool_call) is not None:
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": _arguments(text)}
    if first_delta.is_reasoning:
        return {"type": "thinking", "thinking": text, "signature": signature}
    return {"type": "text", "text": text}


def _arguments(text: str) -> msgspec.Raw | dict[str, Any]:
    try:
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    return msgspec.Raw(text.encode()) if is_object else {}


def _ending(last_delta: Delta) -> dict[str, str | None]:
    """The stop reason in the last delta of a message."""
    assert last_delta.finish_reason is not None
    if last_delta.finish_reason == "stop" and last_delta.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": last_delta.stop}
    return {"stop_reason": _STOP_REASONS[last_delta.finish_reason], "stop_sequence": None}


def _usage(finished: Finished) -> dict[str, Any]:
    """The usage. `images` and `documents` are our extensions: their sizes and tokens."""
    usage = finished.usage
    uncached = usage.prompt_tokens - usage.cached_tokens
    counts = _token_counts(uncached, usage.cached_tokens, usage.completion_tokens)
    media = {"images": finished.images, "documents": finished.documents}
    return counts | {name: uses for name, uses in media.items() if uses}


def _token_counts(uncached: int, cached: int, output: int) -> dict[str, Any]:
    return {
        "input_tokens": uncached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }
