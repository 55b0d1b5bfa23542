"""The items of a response as they come, and the events that tell of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vlm_server.protocol import Delta, FinishReason, TokenLogprob, TokenText, ToolCallDelta

Event = dict[str, Any]
"""Its `type`, and its fields but for the sequence number."""

_Kind = Literal["reasoning", "message", "function_call"]
_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_IMPOSSIBLE = -9999.0
"""OpenAI's value for minus infinity, which JSON does not have."""


@dataclass(slots=True)
class _Open:
    """The item that is being written."""

    kind: _Kind
    item: dict[str, Any]
    place: dict[str, Any]
    """What says in an event where it belongs."""
    call: int | None = None
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)


class Output:
    """Makes items of the deltas of an answer: thoughts, messages and calls, one after the other.

    `request_hex` makes their ids unique. `namespaces` are those of tools, by the tools' names.
    """

    def __init__(self, request_hex: str, namespaces: Mapping[str, str]) -> None:
        self.items: list[dict[str, Any]] = []
        self.finish_reason: FinishReason | None = None
        self._hex = request_hex
        self._namespaces = namespaces
        self._open: _Open | None = None

    def add(self, delta: Delta) -> list[Event]:
        """What a delta says, and what begins or ends with it."""
        events: list[Event] = []
        if delta.tool_call is not None:
            events += self._add_call(delta.tool_call)
        elif delta.is_reasoning:
            events += self._add_thought(delta.text) if delta.text else ()
        elif delta.text or (delta.logprobs and self._is_open("message")):
            events += self._add_text(delta.text, delta.logprobs)
        if delta.finish_reason is not None:
            events += self._finish(delta.finish_reason)
        return events

    def fail(self) -> list[Event]:
        """End the answer, which goes no further; what there is of the open item stays."""
        return self._end("incomplete")

    def _add_text(self, text: str, entries: tuple[TokenLogprob, ...]) -> list[Event]:
        events = self._begin("message")
        shown = [_logprob(entry) for entry in entries]
        events.append(self._delta("response.output_text.delta", text, logprobs=shown))
        self._current.logprobs += shown
        return events

    def _add_thought(self, text: str) -> list[Event]:
        events = self._begin("reasoning")
        events.append(self._delta("response.reasoning_text.delta", text))
        return events

    def _add_call(self, delta: ToolCallDelta) -> list[Event]:
        events = self._begin("function_call", delta)
        if delta.arguments:
            name = "response.function_call_arguments.delta"
            events.append(self._delta(name, delta.arguments))
        return events

    def _delta(self, name: str, text: str, **more: Any) -> Event:
        self._current.texts.append(text)
        return {"type": name, **self._current.place, "delta": text, **more}

    # ---- items -------------------------------------------------------------------------

    @property
    def _current(self) -> _Open:
        assert self._open is not None
        return self._open

    def _is_open(self, kind: _Kind, call: ToolCallDelta | None = None) -> bool:
        index = None if call is None else call.index
        return self._open is not None and (self._open.kind, self._open.call) == (kind, index)

    def _begin(self, kind: _Kind, call: ToolCallDelta | None = None) -> list[Event]:
        """Make sure that an item of this kind is open, and no other."""
        if self._is_open(kind, call):
            return []
        events = self._end("completed")
        index = len(self.items)
        item_id = f"{_PREFIXES[kind]}_{self._hex}{index:04x}"
        item = {"id": item_id, "type": kind, "status": "in_progress", **self._new(kind, call)}
        place = {"item_id": item_id, "output_index": index}
        self.items.append(item)
        events.append(
            {"type": "response.output_item.added", "output_index": index, "item": dict(item)}
        )
        if kind != "function_call":
            place["content_index"] = 0
            part = _part(kind, "", [])
            events.append({"type": "response.content_part.added", **place, "part": part})
        self._open = _Open(kind, item, place, call.index if call else None)
        return events

    def _new(self, kind: _Kind, call: ToolCallDelta | None) -> dict[str, Any]:
        """What an item of this kind begins with."""
        if call is not None:
            name = call.name
            within = {"namespace": self._namespaces[name]} if name in self._namespaces else {}
            return {"call_id": call.id, "name": name, **within, "arguments": ""}
        if kind == "message":
            return {"role": "assistant", "content": []}
        return {"summary": [], "content": []}

    def _end(self, status: str) -> list[Event]:
        """End the item that is open, if there is one."""
        if self._open is None:
            return []
        ended, self._open = self._open, None
        text, place, item = "".join(ended.texts), ended.place, ended.item
        item["status"] = status
        if ended.kind == "function_call":
            item["arguments"] = text
            done = {"name": item["name"], "arguments": text}
            events = [{"type": "response.function_call_arguments.done", **place, **done}]
        else:
            part = _part(ended.kind, text, ended.logprobs)
            item["content"] = [part]
            is_text = ended.kind == "message"
            name = "response.output_text.done" if is_text else "response.reasoning_text.done"
            scored = {"logprobs": ended.logprobs} if is_text else {}
            events = [
                {"type": name, **place, "text": text, **scored},
                {"type": "response.content_part.done", **place, "part": part},
            ]
        index = place["output_index"]
        done_event = {"type": "response.output_item.done", "output_index": index, "item": item}
        return [*events, done_event]

    def _finish(self, reason: FinishReason) -> list[Event]:
        """End the answer. One that says nothing is an empty message."""
        self.finish_reason = reason
        events = [] if self.items else self._begin("message")
        return events + self._end("incomplete" if reason == "length" else "completed")


def _part(kind: _Kind, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    return {**_shown(entry.token), "top_logprobs": [_shown(top) for top in entry.top]}


def _shown(token: TokenText) -> dict[str, Any]:
    logprob = token.logprob if math.isfinite(token.logprob) else _IMPOSSIBLE
    return {"token": token.text, "logprob": logprob, "bytes": list(token.utf8)}
