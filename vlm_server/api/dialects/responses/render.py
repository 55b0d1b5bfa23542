"""Responses and their events, made of the engine's events."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from vlm_server.api.dialects.answer_parts import media_usage
from vlm_server.api.dialects.responses.echo import Options
from vlm_server.api.dialects.responses.parse import ID_PREFIX
from vlm_server.api.dialects.responses.store import ResponseStore
from vlm_server.api.http.answer import token_logprob
from vlm_server.api.http.dialect import BackgroundRenderer
from vlm_server.api.http.streams import sse
from vlm_server.errors import Conflict, RequestCancelled, RequestError
from vlm_server.protocol import Delta, Finished, FinishReason, ToolCallDelta

_encode = msgspec.json.Encoder().encode


class ResponsesRenderer(BackgroundRenderer):
    """The JSON of one response, or its events; stored responses go to `store`.

    A response in the background stays there if it fails or is cancelled.
    """

    def __init__(self, store: ResponseStore, request_id: str, model: str, encoded: bytes) -> None:
        """Raises Conflict if there is no room for a response in the background."""
        options = msgspec.msgpack.decode(encoded, type=Options)
        self._id = request_id
        self._model = model
        self._created = int(time.time())
        self._store = store
        self._owner = options.owner
        self._output = Output(request_id.removeprefix(ID_PREFIX), options.namespaces)
        self._num_events = 0
        self._is_background = options.background
        self._state = "queued" if options.background else "in_progress"
        self._echo: dict[str, Any] = msgspec.json.decode(options.echo, type=dict[str, msgspec.Raw])
        self._echo["store"] = True
        self._echo["store"] = bool(options.items) and store.begin(
            options.owner,
            request_id,
            options.previous_response_id,
            options.items,
            self.accepted(),
        )
        if options.background and not self._echo["store"]:
            raise Conflict(
                "A response in the background must be stored, and there is no room for it "
                "(`server.max_responses_bytes`).",
                "background",
            )

    def accepted(self) -> bytes:
        return _encode(self._response(self._state))

    def on_device(self) -> bytes:
        """The event `response.in_progress` of a response that was queued."""
        if self._state != "queued":
            return b""
        self._state = "in_progress"
        self._store.update(self._owner, self._id, self.accepted())
        return self._state_event()

    def whole(self, choices: Sequence[Sequence[Delta]], finished: Finished) -> bytes:
        for delta in choices[0]:
            self._output.add(delta)
        return self._end(finished)

    def delta(self, delta: Delta) -> bytes:
        """The events of a delta, after those that begin the stream."""
        return self.begin() + self.on_device() + self._events(self._output.add(delta))

    def end(self, finished: Finished) -> bytes:
        """The event with the whole response, and `[DONE]`."""
        response = msgspec.Raw(self._end(finished))
        return self._event(f"response.{self._status}", {"response": response}) + sse.DONE

    def error(self, error: RequestError) -> bytes:
        """The end of the open item, an event with the failed response, and one with the error.

        The error comes last: OpenAI's clients raise it and read no further. They look for
        an object `error`, which OpenAI sends although it documents the fields at the top level.
        OpenAI has no event for a cancelled response: it is `response.incomplete`, without an error.
        """
        events = self.begin() + self._events(self._output.end_item("incomplete"))
        if self._is_background and isinstance(error, RequestCancelled):
            response = self._failed("cancelled", None)
            return events + self._event("response.incomplete", {"response": response}) + sse.DONE
        reason = {"code": error.code, "message": error.message}
        response = self._failed("failed", reason)
        details = reason | {"param": error.param}
        return (
            events
            + self._event("response.failed", {"response": response})
            + self._event("error", details | {"error": {"type": error.type, **details}})
            + sse.DONE
        )

    def keep_alive(self) -> bytes:
        return sse.KEEP_ALIVE

    def empty_chunk(self) -> bytes:
        """An event `response.in_progress` or `queued`; empty after the response's end."""
        if self._output.finish_reason is not None:
            return b""
        return self.begin() or self._state_event()

    @property
    def _status(self) -> str:
        return "incomplete" if self._output.finish_reason == "length" else "completed"

    def begin(self) -> bytes:
        if self._num_events:
            return b""
        response = {"response": self._response(self._state)}
        return self._event("response.created", response) + self._state_event()

    def _state_event(self) -> bytes:
        response = {"response": self._response(self._state)}
        return self._event(f"response.{self._state}", response)

    def _end(self, finished: Finished) -> bytes:
        """The whole response, stored if there is room; its field `store` says whether it is."""
        items = self._output.items
        response = self._response(self._status) | {"output": items, "usage": _usage(finished)}
        encoded = _encode(response)
        if self._echo["store"] and not self._store.finish(
            self._owner, self._id, encoded, _encode(items)
        ):
            encoded = _encode(response | {"store": False})
        return encoded

    def _failed(self, status: str, reason: dict[str, str] | None) -> dict[str, Any]:
        """The response of an answer that failed or was cancelled, stored if in the background."""
        response = self._response(status) | {"error": reason, "output": self._output.items}
        if self._is_background and self._store.fail(self._owner, self._id, _encode(response)):
            return response
        return response | {"store": False}

    def _response(self, status: str) -> dict[str, Any]:
        is_cut = status == "incomplete"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self._model,
            "output": [],
            "usage": None,
            **self._echo,
        }

    def _events(self, events: list[Event]) -> bytes:
        return b"".join(self._event(event.pop("type"), event) for event in events)

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        numbered = {"type": name, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return sse.event(_encode(numbered), name)


def _usage(finished: Finished) -> dict[str, Any]:
    usage = finished.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.prompt_tokens - usage.cached_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        **media_usage(finished),
    }


# ---- items -------------------------------------------------------------------------------

Event = dict[str, Any]
"""An event's `type` and fields, without the sequence number."""

_ItemKey = tuple[Literal["reasoning", "message", "function_call"], int]
"""An item's type, and the number of its call; -1 for other items."""
_MESSAGE: _ItemKey = ("message", -1)
_NAMES = {
    "reasoning": ("rs", "response.reasoning_text"),
    "message": ("msg", "response.output_text"),
    "function_call": ("fc", "response.function_call_arguments"),
}
"""The prefix of ids, and the common part of the names of events, by an item's type."""


@dataclass(slots=True)
class _OpenItem:
    """The item in progress. `place`: the fields of events that refer to it."""

    key: _ItemKey
    item: dict[str, Any]
    place: dict[str, Any]
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The common part of the names of its events."""
        return _NAMES[self.key[0]][1]

    @property
    def text(self) -> str:
        """The text so far, or the arguments."""
        return "".join(self.texts)

    @property
    def part(self) -> dict[str, Any]:
        """The only content part of a message or of reasoning, so far."""
        if self.key == _MESSAGE:
            scored = {"annotations": [], "logprobs": list(self.logprobs)}
            return {"type": "output_text", "text": self.text, **scored}
        return {"type": "reasoning_text", "text": self.text}


class Output:
    """The items of an answer, made from its deltas: reasoning, messages and calls, in order.

    `request_hex` makes their ids unique. `namespaces` are those of tools, by name.
    """

    def __init__(self, request_hex: str, namespaces: Mapping[str, str]) -> None:
        self.items: list[dict[str, Any]] = []
        self.finish_reason: FinishReason | None = None
        self._hex = request_hex
        self._namespaces = namespaces
        self._open: _OpenItem | None = None

    def add(self, delta: Delta) -> list[Event]:
        """The events of a delta, and of items that begin or end with it. An empty answer is an
        empty message.
        """
        events: list[Event] = []
        key = _item_key(delta)
        is_open = self._open is not None and self._open.key == key
        is_scored = bool(delta.logprobs) and is_open and key == _MESSAGE
        if delta.text or delta.tool_call is not None or is_scored:
            if not is_open:
                events += self.end_item("completed") + self._begin_item(key, delta.tool_call)
            events += self._extend_item(delta)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            if not self.items:
                events += self._begin_item(_MESSAGE)
            is_cut = delta.finish_reason == "length"
            events += self.end_item("incomplete" if is_cut else "completed")
        return events

    def _begin_item(self, key: _ItemKey, call: ToolCallDelta | None = None) -> list[Event]:
        kind, index = key[0], len(self.items)
        item_id = f"{_NAMES[kind][0]}_{self._hex}{index:04x}"
        item: dict[str, Any] = {"id": item_id, "type": kind, "status": "in_progress"}
        if call is not None:
            item |= {"call_id": call.id, "name": call.name, "arguments": ""}
            if call.name in self._namespaces:
                item["namespace"] = self._namespaces[call.name]
        elif kind == "message":
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": [], "content": []}
        self.items.append(item)
        event = {"type": "response.output_item.added", "output_index": index, "item": dict(item)}
        place = {"item_id": item_id, "output_index": index}
        if call is not None:
            self._open = _OpenItem(key, item, place)
            return [event]
        place["content_index"] = 0
        self._open = _OpenItem(key, item, place)
        return [event, {"type": "response.content_part.added", **place, "part": self._open.part}]

    def _extend_item(self, delta: Delta) -> list[Event]:
        """The event of the text or arguments that `delta` adds to the open item, if any."""
        assert self._open is not None
        text = delta.text if delta.tool_call is None else delta.tool_call.arguments
        if not text and delta.tool_call is not None:
            return []
        self._open.texts.append(text)
        event = {"type": f"{self._open.name}.delta", **self._open.place, "delta": text}
        if self._open.key == _MESSAGE:
            event["logprobs"] = [token_logprob(entry) for entry in delta.logprobs]
            self._open.logprobs += event["logprobs"]
        return [event]

    def end_item(self, status: str) -> list[Event]:
        """The events at the end of the open item, if any."""
        if self._open is None:
            return []
        open_item, self._open = self._open, None
        item, place = open_item.item, open_item.place
        item["status"] = status
        event = {"type": f"{open_item.name}.done", **place}
        if item["type"] == "function_call":
            item["arguments"] = open_item.text
            events = [event | {"name": item["name"], "arguments": open_item.text}]
        else:
            part = open_item.part
            item["content"] = [part]
            part_fields = {name: part[name] for name in ("text", "logprobs") if name in part}
            events = [
                event | part_fields,
                {"type": "response.content_part.done", **place, "part": part},
            ]
        index = place["output_index"]
        return [*events, {"type": "response.output_item.done", "output_index": index, "item": item}]


def _item_key(delta: Delta) -> _ItemKey:
    if delta.tool_call is not None:
        return "function_call", delta.tool_call.index
    return ("reasoning", -1) if delta.is_reasoning else _MESSAGE


def encode_input_tokens(finished: Finished) -> bytes:
    """The answer of `/v1/responses/input_tokens`."""
    tokens = finished.usage.prompt_tokens
    return _encode({"object": "response.input_tokens", "input_tokens": tokens})
