"""`POST /v1/chat/completions`: the order of the steps, from the queue slot to the last byte."""

from __future__ import annotations

from contextlib import aclosing
from functools import partial

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vlm_server.api.http import access_log, body, sse
from vlm_server.api.http.access import cache_salt, client_id
from vlm_server.api.http.access_log import Entry
from vlm_server.api.http.answer import Answer, answer, as_request_error, whole
from vlm_server.api.http.disconnect import until_disconnect
from vlm_server.api.http.intake.calls import Call, Context
from vlm_server.api.http.intake.intake import Intake
from vlm_server.api.http.queue.arriving import ArrivingBodies
from vlm_server.api.http.queue.deadlines import RequestClock
from vlm_server.api.http.queue.queue_slots import QueueSlot, QueueSlots
from vlm_server.api.http.urls.media_urls import MediaUrls
from vlm_server.api.openai import errors
from vlm_server.api.openai.intake import DIALECT, read_text
from vlm_server.api.openai.render import Renderer
from vlm_server.errors import EngineUnavailable
from vlm_server.media.external import BytesNeeded
from vlm_server.protocol import Finished
from vlm_server.settings import Settings
from vlm_server.supervisor.client import EngineClient


class ChatCompletions:
    """The endpoint, as an ASGI application.

    The engine's events are always closed and the queue slot released: if the client
    disconnects, the work is cancelled wherever it is, and its clean-up does both.
    """

    def __init__(
        self, engine: EngineClient, queue_slots: QueueSlots, intake: Intake, settings: Settings
    ) -> None:
        self._engine = engine
        self._queue_slots = queue_slots
        self._intake = intake
        self._limits = settings.limits
        self._deadlines = settings.deadlines
        self._keepalive_seconds = settings.server.stream_keepalive_seconds
        self._arriving = ArrivingBodies(settings.limits.max_arriving_bytes)
        self._media_urls = MediaUrls(settings.urls, settings.limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        body.check_headers(headers, self._limits)
        clock = RequestClock(headers, self._deadlines)
        status = self._engine.status
        if not status.is_ready:
            raise EngineUnavailable(f"The engine is not ready: {status.state}.")
        client = client_id.of(scope)
        self._queue_slots.check(client, headers)
        async with clock.before_submit():
            data = await body.read(receive, self._limits, self._arriving)
        with self._queue_slots.take(client, len(data)) as slot:
            answering = self._answer(data, clock, slot, scope, receive, send)
            await until_disconnect(receive, answering)

    async def _answer(
        self,
        data: bytearray,
        clock: RequestClock,
        slot: QueueSlot,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        entry = access_log.of(scope)
        model = self._engine.status.model_name
        context = Context(
            model=model,
            request_id=f"chatcmpl-{entry.request_id}",
            cache_salt=cache_salt.of(scope),
            client=client_id.of(scope),
            limits=self._limits,
        )
        async with clock.before_submit():
            request, wanted = await self._read_call(data, slot, context)
        entry.images, entry.videos = wanted.num_images, wanted.num_videos
        render = Renderer(context.request_id, model, wanted.include_usage)
        request = request.with_deadlines(clock.left())
        events = clock.watch(self._engine.stream(request), slot.release_body)
        del request  # frees the images while the engine answers
        async with aclosing(answer(events, entry)) as deltas:
            if wanted.stream:
                stream = sse.EventStream(send, self._keepalive_seconds)
                async with stream.kept_alive():
                    await _stream(deltas, render, stream, entry)
            else:
                content = render.completion(*await whole(deltas, wanted.num_choices))
                response = Response(content, media_type="application/json")
                await response(scope, receive, send)

    async def _read_call(self, data: bytearray, slot: QueueSlot, context: Context) -> Call:
        read = partial(self._intake.read, DIALECT, read_text, data)
        try:
            try:
                return await read(context)
            except BytesNeeded as needed:
                given = await self._media_urls.read(needed.urls)
            slot.reserve(len(data) + sum(map(len, given.values())))
            return await read(msgspec.structs.replace(context, given=given))
        finally:
            body.discard(data)  # the caller still holds it, and the answer may take minutes


async def _stream(deltas: Answer, render: Renderer, stream: sse.EventStream, entry: Entry) -> None:
    """Send the answer as events. Errors are raised until the stream has begun, with an event or a
    comment, and sent as an event after that.

    The chunk with a choice's finish reason is sent together with what comes next, the last one
    with `[DONE]`: a client that disconnects when it sees it interrupts nothing.
    """
    chunks: list[bytes] = []
    begun: set[int] = set()
    try:
        async for event in deltas:
            if isinstance(event, Finished):
                chunks += [render.usage(event)] if render.include_usage else []
                await stream.end(*map(sse.event, chunks), sse.DONE)
                return
            if event.choice not in begun:
                begun.add(event.choice)
                chunks.append(render.role(event))
            if event.text or event.logprobs:
                await stream.write(*map(sse.event, [*chunks, render.text(event)]))
                chunks = []
            if event.finish_reason:
                chunks.append(render.finish(event))
    except Exception as error:
        if not stream.started:
            raise
        await stream.end(sse.event(errors.encode(as_request_error(error, entry))))
