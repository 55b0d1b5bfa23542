"""The routes of watches: begin one and read its events, give it frames, end it."""

from __future__ import annotations

import asyncio
import math
from contextlib import AbstractContextManager
from functools import partial

import anyio.to_thread
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vlm_server.api.dialects.openai.watch import events
from vlm_server.api.dialects.openai.watch.camera import Camera
from vlm_server.api.dialects.openai.watch.parts import boundary_of
from vlm_server.api.dialects.openai.watch.schema import WatchPlan, parse_watch
from vlm_server.api.dialects.openai.watch.watch import Watch
from vlm_server.api.dialects.openai.watch.watches import Watches
from vlm_server.api.http import access_log, body
from vlm_server.api.http.access import keys
from vlm_server.api.http.answer import json_response
from vlm_server.api.http.generation import Generation, context_of, resume
from vlm_server.api.http.streams import event_logs, sse
from vlm_server.api.http.streams.event_log import Run
from vlm_server.api.http.streams.event_logs import Attachment
from vlm_server.api.http.streams.sse import EventStream
from vlm_server.api.parsing import json_body
from vlm_server.errors import (
    InvalidRequest,
    PayloadTooLarge,
    UnsupportedMediaType,
)

_KIND = "watch"
"""The kind of its event logs: a watch is resumed at its own route alone."""


class WatchEndpoint:
    """`POST /v1/watch`, an ASGI application: the watch lives as long as its stream of events.

    A resumable stream outlives its connection for a while.
    """

    def __init__(self, shared: Generation, watches: Watches) -> None:
        self._shared = shared
        self._watches = watches

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shared, headers = self._shared, Headers(scope=scope)
        if last_event_id := headers.get(event_logs.LAST_EVENT_HEADER):
            await resume(shared, _KIND, last_event_id, scope, receive, send)
            return
        stream = self._stream(send, scope)
        is_resumable = event_logs.is_wanted(headers, shared.server)
        self._watches.check_room(keys.owner_of(scope))
        media_type = headers.get("content-type", "")
        if media_type.lower().startswith("multipart/"):
            if is_resumable:
                text = "A watch whose frames come in its own body can't be resumed."
                raise InvalidRequest(text, event_logs.RESUMABLE_HEADER)
            camera = Camera(receive, boundary_of(media_type), shared.limits)
            with await self._open(await camera.first_part(), scope) as watch:
                await self._run_fed(watch, camera, stream, scope)
            return
        body.check_headers(headers, shared.limits)
        data = await body.read(receive, shared.limits, shared.arriving)
        with await self._open(data, scope) as watch:
            attachment = Attachment(shared.event_logs)
            if is_resumable:
                work = self._watch_resumably(watch, attachment, scope, send)
            else:
                work = self._watch(watch, stream, scope)
            await body.until_disconnect(receive, work, attachment.leave)

    async def _watch(self, watch: Watch, stream: EventStream, scope: Scope) -> None:
        await (self._follow if watch.plan.url else self._run)(watch, stream, scope)

    async def _watch_resumably(
        self, watch: Watch, attachment: Attachment, scope: Scope, send: Send
    ) -> None:
        """Keep the events, for clients that come and leave."""
        run = Run.of_current_task(
            watch.owner,
            access_log.entry_of(scope).request_id,
            _KIND,
            lambda error: events.ended(watch.id, "failed", error, watch.frames.counts),
        )
        log = self._shared.event_logs.open(run)
        async with attachment.to(log, send):
            await self._watch(watch, self._stream(log.send, scope), scope)

    def _stream(self, send: Send, scope: Scope) -> EventStream:
        server = self._shared.server
        mode = sse.keepalive_of(Headers(scope=scope), server)
        keep_alive = None if mode == "off" else lambda: sse.KEEP_ALIVE
        return EventStream(send, sse.CONTENT_TYPE, keep_alive, server.stream_keepalive_seconds)

    async def _follow(self, watch: Watch, stream: EventStream, scope: Scope) -> None:
        """Watch the camera at the URL of the plan. Raises RequestError before the first event."""
        async with self._watches.cameras.followed(watch.plan.url) as (media_type, receive):
            if not media_type.lower().startswith("multipart/"):
                raise InvalidRequest("The camera at `url` sends no multipart.", "url")
            camera = Camera(receive, boundary_of(media_type), self._shared.limits)
            await self._run_fed(watch, camera, stream, scope)

    async def _run_fed(
        self, watch: Watch, camera: Camera, stream: EventStream, scope: Scope
    ) -> None:
        """Run `watch` with the frames of `camera`, until one of them ends."""
        client = keys.key_of(scope).name
        give = partial(self._watches.give, watch, frame_time=None, client=client)
        running = asyncio.create_task(self._run(watch, stream, scope))
        feeding = asyncio.create_task(camera.feed(watch, give, stream.write))
        try:
            await asyncio.wait((running, feeding), return_when=asyncio.FIRST_COMPLETED)
        finally:
            running.cancel()
            feeding.cancel()
            await asyncio.gather(running, feeding, return_exceptions=True)
        (feeding if running.cancelled() else running).result()

    async def _open(self, data: bytearray, scope: Scope) -> AbstractContextManager[Watch]:
        """The watch that the JSON in `data` asks for, to be entered. Raises RequestError."""
        plan = await self._plan(data, scope)
        return self._watches.opened(keys.owner_of(scope), plan)

    async def _run(self, watch: Watch, stream: EventStream, scope: Scope) -> None:
        ask = partial(self._watches.asker.ask, watch.plan, scope=scope)
        async with stream.kept_alive():
            await watch.run(ask, stream.write, stream.end)

    async def _plan(self, data: bytearray, scope: Scope) -> WatchPlan:
        if not json_body.is_small(data):
            raise PayloadTooLarge("The request's body is too large for this route.")
        context = context_of(self._shared, scope, "")
        parse = partial(parse_watch, bytes(data), context, self._watches.settings)
        plan = await anyio.to_thread.run_sync(parse)
        entry = access_log.entry_of(scope)
        entry.model, entry.ignored, entry.state = plan.model, plan.ignored, "sent"
        return plan


class WatchRoutes:
    """The routes about a watch by its id. All raise NotFound for another key's."""

    def __init__(self, shared: Generation, watches: Watches) -> None:
        self._shared = shared
        self._watches = watches

    async def give_frame(self, request: Request) -> Response:
        """`POST /v1/watch/{watch_id}/frames`: the bytes of a picture."""
        shared, watch = self._shared, self._watch_of(request)
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if not (media_type.startswith("image/") or media_type == "application/octet-stream"):
            raise UnsupportedMediaType("The Content-Type of a frame must be image/jpeg or another.")
        body.check_headers(request.headers, shared.limits, any_type=True)
        time = _time(request)
        data = await body.read(request.receive, shared.limits, shared.arriving)
        limit = shared.limits.max_image_bytes
        if len(data) > limit:
            raise PayloadTooLarge(
                f"The frame is larger than {limit} bytes (limits.max_image_bytes).", "frame"
            )
        if not data:
            raise InvalidRequest("The frame is empty.", "frame")
        client = keys.key_of(request.scope).name
        stamp, change = await self._watches.give(watch, bytes(data), time, client)
        access_log.entry_of(request.scope).images = 1
        return json_response({"watch_id": watch.id, "frame": stamp, "change": round(change, 4)})

    async def delete(self, request: Request) -> Response:
        """`DELETE /v1/watch/{watch_id}`: end it; its stream gets the last event."""
        watch = self._watch_of(request)
        watch.end("deleted")
        return json_response({"id": watch.id, "object": "watch", "deleted": True})

    def _watch_of(self, request: Request) -> Watch:
        owner = keys.owner_of(request.scope)
        return self._watches.find(owner, request.path_params["watch_id"])


def _time(request: Request) -> float | None:
    """The query's `time` in seconds. Raises InvalidRequest."""
    text = request.query_params.get("time")
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise InvalidRequest("`time` must be a number of seconds.", "time")
    return seconds
