"""Renders the engine's events as a response, or as the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from vlm_server.api.dialects.responses.intake import ID_PREFIX
from vlm_server.api.dialects.responses.options import Options
from vlm_server.api.dialects.responses.output import Event, Output
from vlm_server.api.dialects.responses.store import ResponseStore
from vlm_server.api.http import sse
from vlm_server.errors import RequestError
from vlm_server.protocol import Delta, Finished

_encode = msgspec.json.Encoder().encode


class ResponsesRenderer:
    """The JSON of one response, or its events; what is to be stored goes into `store`."""

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
        """The whole response."""
        for delta in choices[0]:
            self._output.add(delta)
        return self._end(finished)

    def delta(self, delta: Delta) -> bytes:
        """The events of a delta; before the first those that begin the stream."""
        return self._begin() + self._events(self._output.add(delta))

    def end(self, finished: Finished) -> bytes:
        """The event with the whole response, and `[DONE]`."""
        response = msgspec.Raw(self._end(finished))
        return self._event(f"response.{self._status}", {"response": response}) + sse.DONE

    def error(self, error: RequestError) -> bytes:
        """The end of the open item, an event with the response that failed, one with the error.

        The error comes last, since OpenAI's clients raise it and read no further. They know it by
        its object `error`, which OpenAI sends; its documents have the fields beside it.
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
        """A comment: every reader of events skips it."""
        return sse.KEEP_ALIVE

    def empty_chunk(self) -> bytes:
        """That the response is in progress; nothing behind its end, whose events may wait."""
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
        """The whole response, which is stored if there is room for it, and says so."""
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
