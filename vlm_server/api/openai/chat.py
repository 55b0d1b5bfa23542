"""`POST /v1/chat/completions`: the order of the steps, from the queue slot to the last byte."""

from __future__ import annotations

from contextlib import aclosing

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vlm_server.api.http import access_log, body, cache_salt, sse
from vlm_server.api.http.access_log import Entry
from vlm_server.api.http.answer import Answer, answer, as_request_error, whole
from vlm_server.api.http.calls import Call, Context
from vlm_server.api.http.disconnect import until_disconnect
from vlm_server.api.http.intake import Intake
from vlm_server.api.http.queue_slots import QueueSlots
from vlm_server.api.openai import errors
from vlm_server.api.openai.intake import DIALECT, read_text
from vlm_server.api.openai.render import Renderer
from vlm_server.errors import EngineUnavailable
from vlm_server.protocol import Finished
from vlm_server.settings import Limits
from vlm_server.supervisor.client import EngineClient


class ChatCompletions:
    """The endpoint, as an ASGI application.

    The engine's events are always closed and the queue slot released: if the client
    disconnects, the work is cancelled wherever it is, and its clean-up does both.
    """

    def __init__(
        self, engine: EngineClient, queue_slots: QueueSlots, limits: Limits, intake: Intake
    ) -> None:
        self._engine = engine
        self._queue_slots = queue_slots
        self._limits = limits
        self._intake = intake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body.check_headers(Headers(scope=scope), self._limits)
        status = self._engine.status
        if not status.is_ready:
            raise EngineUnavailable(f"The engine is not ready: {status.state}.")
        with self._queue_slots.take():
            data = await body.read(receive, self._limits)
            await until_disconnect(receive, self._answer(data, scope, receive, send))

    async def _answer(self, data: bytearray, scope: Scope, receive: Receive, send: Send) -> None:
        entry = access_log.of(scope)
        request, wanted = await self._read_call(
            data, f"chatcmpl-{entry.request_id}", cache_salt.of(scope)
        )
        entry.images, entry.videos = wanted.num_images, wanted.num_videos
        model = self._engine.status.model_name
        render = Renderer(request.submit.request_id, model, wanted.include_usage)
        events = self._engine.stream(request)
        del request  # frees the images while the engine answers
        async with aclosing(answer(events, entry)) as deltas:
            if wanted.stream:
                await _stream(deltas, render, sse.EventStream(send), entry)
            else:
                content = render.completion(*await whole(deltas, wanted.num_choices))
                response = Response(content, media_type="application/json")
                await response(scope, receive, send)

    async def _read_call(self, data: bytearray, request_id: str, salt: str) -> Call:
        context = Context(self._engine.status.model_name, request_id, salt, self._limits)
        try:
            return await self._intake.read(DIALECT, read_text, data, context)
        finally:
            body.discard(data)  # the caller still holds it, and the answer may take minutes


async def _stream(deltas: Answer, render: Renderer, stream: sse.EventStream, entry: Entry) -> None:
    """Send the answer as events. Errors are raised until the first event, sent as one after it.

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
