"""`POST /v1/responses`, and the routes for stored responses."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
from anyio import to_thread
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vlm_server.api.dialects import pages
from vlm_server.api.dialects.responses.parse import ID_PREFIX
from vlm_server.api.dialects.responses.store import ResponseStore
from vlm_server.api.http import access_log
from vlm_server.api.http.access import keys
from vlm_server.api.http.answer import json_response
from vlm_server.api.http.generation import Endpoint
from vlm_server.api.http.streams.event_log import EventLog
from vlm_server.api.http.streams.event_logs import EventLogs
from vlm_server.api.parsing.ignored_fields import IgnoredFields
from vlm_server.errors import InvalidRequest, NotFound, NotSupported, RequestCancelled

DEFAULT_ITEMS = 20
MAX_ITEMS = 100
_MAX_DIGITS = 9
_CANCELLED = RequestCancelled("The response was cancelled by its client.")


async def refuse_conversation(request: Request) -> Response:
    """The answer of OpenAI's routes for conversations, which are not supported."""
    raise NotSupported(
        f"{request.method} /v1/conversations is not supported: go on from a response with "
        "`previous_response_id`, or send all items"
    )


class ResponsesEndpoint:
    """The endpoint that makes responses, as an ASGI application.

    Failed ones are not stored, unless they are in the background.
    """

    def __init__(self, endpoint: Endpoint, store: ResponseStore) -> None:
        self._endpoint = endpoint
        self._store = store
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._endpoint(scope, receive, send)
        finally:
            response_id = f"{ID_PREFIX}{access_log.entry_of(scope).request_id}"
            self._store.abandon(keys.owner_of(scope), response_id)
            self._expire_later()

    def _expire_later(self) -> None:
        """Start a timer that removes expired responses without any request."""
        seconds = self._store.seconds_left()
        if self._timer is None and seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _expire(self) -> None:
        self._timer = None
        self._store.drop_expired()
        self._expire_later()


class StoredResponses:
    """The routes for stored responses. All raise NotFound for other clients' responses.

    Those in the background have their events in `logs`.
    """

    def __init__(self, store: ResponseStore, logs: EventLogs) -> None:
        self._store = store
        self._logs = logs

    async def retrieve(self, request: Request) -> Response:
        """A response, or the rest of its stream after the event `starting_after`."""
        query = request.query_params
        response = self._store.response(*_of(request))
        wanted = query.get("stream", "false")
        if wanted not in ("true", "false"):
            raise InvalidRequest("`stream` must be true or false.", "stream")
        if wanted == "false":
            _ignore_all_but(request, "stream")
            return _json(response)
        _ignore_all_but(request, "stream", "starting_after")
        position = _position(query.get("starting_after"))
        return self._logs.follow(self._log_of(request), position, "starting_after")

    async def delete(self, request: Request) -> Response:
        """Delete a response; one in the background that is being made is cancelled."""
        owner, response_id = _of(request)
        self._store.response(owner, response_id)
        with contextlib.suppress(InvalidRequest):
            if (log := self._log_of(request)).run.is_background:
                log.cancel(_CANCELLED)
        self._store.delete(owner, response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """Cancel a response in the background; one that has ended stays as it is."""
        owner, response_id = _of(request)
        if not _backgrounds.decode(self._store.response(owner, response_id)).background:
            raise InvalidRequest(
                "Only a response made with `background` can be cancelled; close the connection of "
                "another that is being answered.",
                "response_id",
            )
        with contextlib.suppress(InvalidRequest):  # it has ended long ago
            self._log_of(request).cancel(_CANCELLED)
        return _json(self._store.response(owner, response_id))

    def _log_of(self, request: Request) -> EventLog:
        """The events of a response. Raises InvalidRequest."""
        owner, response_id = _of(request)
        try:
            return self._logs.find(owner, response_id.removeprefix(ID_PREFIX))
        except NotFound:
            raise InvalidRequest(
                "Only a response made with `background` can be streamed again, until "
                "`server.stream_resume_keep_seconds` after its end, and if there is room for its "
                "events (`server.max_stream_resume_bytes`).",
                "stream",
            ) from None

    async def input_items(self, request: Request) -> Response:
        """The items that a response was made from, by default the last ones first."""
        turns = self._store.input_items(*_of(request))
        _ignore_all_but(request, "after", "limit", "order")
        return _json(await to_thread.run_sync(_page, turns, request.query_params))


def _ignore_all_but(request: Request, *effective: str) -> None:
    """Report parameters without effect in the request's URL."""
    ignored = IgnoredFields()
    for name, value in request.query_params.items():
        if name not in effective:
            ignored.add(name, value)
    access_log.entry_of(request.scope).ignored = ignored.names


def _page(turns: tuple[bytes, ...], query: QueryParams) -> bytes:
    """A page of the items of `turns`. Runs on a thread: they may have many images."""
    items = [item for turn in turns for item in _lists.decode(turn)]
    if pages.is_descending(query):
        items.reverse()
    page = _after(items, query.get("after"))
    limit = pages.limit_of(query, DEFAULT_ITEMS, MAX_ITEMS)
    page_items = page[:limit]
    page_json = {
        "object": "list",
        "data": page_items,
        "first_id": _id(page_items[0]) if page_items else "",
        "last_id": _id(page_items[-1]) if page_items else "",
        "has_more": len(page) > limit,
    }
    return msgspec.json.encode(page_json)


def _position(starting_after: str | None) -> int:
    """The number of the first event after that one. Raises InvalidRequest."""
    if starting_after is None:
        return 0
    if not (starting_after.isascii() and starting_after.isdecimal()):
        raise InvalidRequest("`starting_after` must be a whole number, from 0.", "starting_after")
    return int(starting_after[:_MAX_DIGITS]) + 1


class _Background(msgspec.Struct):
    background: bool = False


_backgrounds = msgspec.json.Decoder(_Background)


class _Identified(msgspec.Struct):
    id: str


_ids = msgspec.json.Decoder(_Identified)
_lists = msgspec.json.Decoder(list[msgspec.Raw])


def _of(request: Request) -> tuple[str, str]:
    return keys.owner_of(request.scope), request.path_params["response_id"]


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


def _id(item: msgspec.Raw) -> str:
    return _ids.decode(item).id


def _after(items: list[msgspec.Raw], item_id: str | None) -> list[msgspec.Raw]:
    """Items after the last one with that id: clients may resend an item in a later turn."""
    if item_id is None:
        return items
    for i in reversed(range(len(items))):
        if _id(items[i]) == item_id:
            return items[i + 1 :]
    raise InvalidRequest("`after` is the id of none of the items.", "after")
