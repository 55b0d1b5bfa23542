"""Responses and their events, made of the engine's events."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from vlm_server import protocol
from vlm_server.api.dialects import logprobs
from vlm_server.api.dialects.responses.echo import Options
from vlm_server.api.dialects.responses.parse import ID_PREFIX
from vlm_server.api.dialects.responses.store import ResponseStore
from vlm_server.api.http import sse
from vlm_server.errors import RequestError
from vlm_server.protocol import Delta, Finished, FinishReason, ToolCallDelta

_encode = msgspec.json.Encoder().encode


class ResponsesRenderer:
    """The JSON of one response, or its events; `store` gets what is stored."""

    def __init__(self, request_id: str, model: str, options: Options, store: ResponseStore) -> None:
        self._id = request_id
        self._model = model
        self._created = int(time.time())
        self._store = store
        self._owner = options.owner
        self._output = Output(request_id.removeprefix(ID_PREFIX), options.namespaces)
        self._num_events = 0
        self._echo: dict[str, Any] = msgspec.json.decode(options.echo, type=dict[str, msgspec.Raw])
        self._echo["store"] = True
        self._echo["store"] = bool(options.items) and store.begin(
            options.owner,
            request_id,
            options.previous_response_id,
            options.items,
            _encode(self._response("in_progress")),
        )

    def whole(self, choices: Sequence[Sequence[Delta]], finished: Finished) -> bytes:
        for delta in choices[0]:
            self._output.add(delta)
        return self._end(finished)

    def delta(self, delta: Delta) -> bytes:
        """The events of a delta, behind those that begin the stream."""
        return self._begin() + self._events(self._output.add(delta))

    def end(self, finished: Finished) -> bytes:
        """The event with the whole response, and `[DONE]`."""
        response = msgspec.Raw(self._end(finished))
        return self._event(f"response.{self._status}", {"response": response}) + sse.DONE

    def error(self, error: RequestError) -> bytes:
        """The end of the open item, an event with the failed response, and one with the error.

        The error comes last: OpenAI's clients raise it and read no further. They know it by its
        object `error`, which OpenAI sends, while its documents have the fields beside it.
        """
        begun = self._begin() + self._events(self._output.fail())
        said = {"code": error.code, "message": error.message}
        self._echo["store"] = False
        failed = self._response("failed") | {"error": said, "output": self._output.items}
        told = said | {"param": error.param}
        return (
            begun
            + self._event("response.failed", {"response": failed})
            + self._event("error", told | {"error": {"type": error.type, **told}})
            + sse.DONE
        )

    def keep_alive(self) -> bytes:
        return sse.KEEP_ALIVE

    def empty_chunk(self) -> bytes:
        """An event that tells that the response is in progress; empty behind its end."""
        if self._output.finish_reason is not None:
            return b""
        response = {"response": self._response("in_progress")}
        return self._begin() or self._event("response.in_progress", response)

    @property
    def _status(self) -> str:
        return "incomplete" if self._output.finish_reason == "length" else "completed"

    def _begin(self) -> bytes:
        if self._num_events:
            return b""
        response = {"response": self._response("in_progress")}
        return self._event("response.created", response) + self._event(
            "response.in_progress", response
        )

    def _end(self, finished: Finished) -> bytes:
        """The whole response, which is stored if there is room, and says whether it is."""
        items = self._output.items
        response = self._response(self._status) | {"output": items, "usage": _usage(finished)}
        encoded = _encode(response)
        if self._echo["store"] and not self._store.finish(
            self._owner, self._id, encoded, _encode(items)
        ):
            encoded = _encode(response | {"store": False})
        return encoded

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
    media = {"images": finished.images, "videos": finished.videos}
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.prompt_tokens - usage.cached_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        **{name: uses for name, uses in media.items() if uses},
    }


# ---- items -------------------------------------------------------------------------------

Event = dict[str, Any]
"""An event's `type` and fields, without the sequence number."""

_Kind = Literal["reasoning", "message", "function_call"]
_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


@dataclass(slots=True)
class _Open:
    """The item under way. `place`: the fields by which events refer to it."""

    kind: _Kind
    item: dict[str, Any]
    place: dict[str, Any]
    call: int | None = None
    texts: list[str] = field(default_factory=list)
    scores: list[logprobs.TokenLogprob] = field(default_factory=list)


class Output:
    """The items of an answer, made of its deltas: reasoning, messages and calls, in their order.

    `request_hex` makes their ids unique. `namespaces` are those of tools, by the tools' names.
    """

    def __init__(self, request_hex: str, namespaces: Mapping[str, str]) -> None:
        self.items: list[dict[str, Any]] = []
        self.finish_reason: FinishReason | None = None
        self._hex = request_hex
        self._namespaces = namespaces
        self._open: _Open | None = None

    def add(self, delta: Delta) -> list[Event]:
        """The events of a delta, and of what begins or ends with it."""
        events: list[Event] = []
        if delta.tool_call is not None:
            events += self._add_call(delta.tool_call)
        elif delta.is_reasoning:
            events += self._add_reasoning(delta.text) if delta.text else ()
        elif delta.text or (delta.logprobs and self._is_open("message")):
            events += self._add_text(delta.text, delta.logprobs)
        if delta.finish_reason is not None:
            events += self._finish(delta.finish_reason)
        return events

    def fail(self) -> list[Event]:
        """End an answer that failed; what there is of the open item stays."""
        return self._end("incomplete")

    def _add_text(self, text: str, entries: tuple[protocol.TokenLogprob, ...]) -> list[Event]:
        events = self._begin("message")
        shown = [logprobs.token_logprob(entry) for entry in entries]
        events.append(self._delta("response.output_text.delta", text, logprobs=shown))
        self._current.scores += shown
        return events

    def _add_reasoning(self, text: str) -> list[Event]:
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
        """Open an item of this kind, unless it is open, and end any other."""
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
        """The initial fields of an item of this kind."""
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
            part = _part(ended.kind, text, ended.scores)
            item["content"] = [part]
            is_text = ended.kind == "message"
            name = "response.output_text.done" if is_text else "response.reasoning_text.done"
            scored = {"logprobs": ended.scores} if is_text else {}
            events = [
                {"type": name, **place, "text": text, **scored},
                {"type": "response.content_part.done", **place, "part": part},
            ]
        index = place["output_index"]
        done_event = {"type": "response.output_item.done", "output_index": index, "item": item}
        return [*events, done_event]

    def _finish(self, reason: FinishReason) -> list[Event]:
        """End the answer. An empty one is an empty message."""
        self.finish_reason = reason
        events = [] if self.items else self._begin("message")
        return events + self._end("incomplete" if reason == "length" else "completed")


def _part(kind: _Kind, text: str, scores: list[logprobs.TokenLogprob]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}


def encode_input_tokens(finished: Finished) -> bytes:
    """The answer of `/v1/responses/input_tokens`."""
    tokens = finished.usage.prompt_tokens
    return _encode({"object": "response.input_tokens", "input_tokens": tokens})
