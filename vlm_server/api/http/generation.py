"""The generating endpoint: its steps, from the queue slot to the last byte."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vlm_server.api.files.store import FileStore
from vlm_server.api.http import access_log, body
from vlm_server.api.http.access import keys
from vlm_server.api.http.access_log import Entry
from vlm_server.api.http.answer import Answer, answer, as_request_error, whole_response
from vlm_server.api.http.body import ArrivingBodies, until_disconnect
from vlm_server.api.http.deadlines import RequestClock
from vlm_server.api.http.dialect import BackgroundRenderer, Dialect, Renderer
from vlm_server.api.http.documents.drawing import Documents
from vlm_server.api.http.model_metrics import KeyUsage, ModelMetrics, no_metrics
from vlm_server.api.http.queue import gaps
from vlm_server.api.http.queue.gaps import Gaps
from vlm_server.api.http.queue.queue_slots import QueueSlot, QueueSlots
from vlm_server.api.http.recorder import AnswerRecorder
from vlm_server.api.http.request_media import RequestMedia
from vlm_server.api.http.streams import event_logs, sse
from vlm_server.api.http.streams.event_log import EventLog, Run
from vlm_server.api.http.streams.event_logs import Attachment, EventLogs
from vlm_server.api.http.streams.keep_alive import KeepAlives
from vlm_server.api.http.streams.sse import EventStream
from vlm_server.api.http.urls.media_urls import MediaUrls
from vlm_server.api.parsing import routing_key, served_models
from vlm_server.api.parsing.body_parser import BodyParser
from vlm_server.api.parsing.media.documents import PagesNeeded
from vlm_server.api.parsing.media.external import BytesNeeded
from vlm_server.api.parsing.parsed_request import (
    Context,
    EncodedRequest,
    History,
    HistoryNeeded,
    RequestSummary,
)
from vlm_server.errors import PayloadTooLarge
from vlm_server.protocol import Delta, Finished, Usage
from vlm_server.settings import Settings
from vlm_server.supervisor.engine_process.client import EngineRequest, ModelClient, RequestEvent

_WAITING_FRACTION = 1 / 4
"""The part of the queue's slots that answers may hold whose clients have left and may resume."""


class Generation:
    """State shared by the generating endpoints of all dialects."""

    def __init__(
        self,
        models: ModelClient,
        queue_slots: QueueSlots,
        body_parser: BodyParser,
        settings: Settings,
        files: FileStore,
    ) -> None:
        self.models = models
        self.queue_slots = queue_slots
        self.body_parser = body_parser
        self.settings = settings
        self.limits = settings.limits
        self.server = settings.server
        self.arriving = ArrivingBodies(settings.limits.max_arriving_bytes)
        self.metrics = no_metrics()
        self.key_usage = KeyUsage()
        self.files = files
        self.media = RequestMedia(files, MediaUrls(settings.urls, settings.limits), settings.limits)
        self.event_logs = EventLogs(
            settings.server, max(1, int(settings.limits.max_requests * _WAITING_FRACTION))
        )
        self.documents = Documents(settings)
        self.gaps = Gaps(settings.batches.min_idle_seconds)
        self.line_slots = QueueSlots(settings.limits)
        """The slots of batches' lines, which take none from interactive requests."""
        self.in_flight: dict[str, Scope] = {}
        """The requests that hold a queue slot, by their id in the engine."""


class Endpoint:
    """A generating endpoint of one dialect, as an ASGI application.

    A client that disconnects cancels the work, whose clean-up closes the engine's events and
    releases the queue slot; except for a resumable stream and an answer in the background, whose
    handler goes on. `history` has the earlier turns to which requests may refer.
    """

    def __init__(
        self,
        shared: Generation,
        dialect: Dialect,
        history: History | None = None,
        *,
        any_type: bool = False,
    ) -> None:
        """`any_type`: take bodies with any Content-Type, see `body.check_headers`."""
        self._shared = shared
        self._dialect = dialect
        self._history = history
        self._any_type = any_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._shared.gaps.request(scope):
            await self._handle(scope, receive, send)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        shared, headers = self._shared, Headers(scope=scope)
        slots = shared.line_slots if gaps.is_line(scope) else shared.queue_slots
        access_log.entry_of(scope).routing_key = routing_key.of_headers(headers)
        if last_event_id := headers.get(event_logs.LAST_EVENT_HEADER):
            await resume(shared, self._dialect.name, last_event_id, scope, receive, send)
            return
        access_log.entry_of(scope).dialect = self._dialect.name
        body.check_headers(headers, shared.limits, any_type=self._any_type)
        clock = RequestClock(headers, shared.settings.deadlines)
        sse.keepalive_of(headers, shared.server)  # refuses a bad header before the body
        event_logs.is_wanted(headers, shared.server)
        shared.models.check_ready()
        client = keys.key_of(scope).name
        slots.check(client, headers)
        async with clock.before_submit():
            data = await body.read(receive, shared.limits, shared.arriving)
        request_id = self._request_id(scope)
        with slots.hold(client, len(data)) as slot:
            shared.in_flight[request_id] = scope
            attachment = Attachment(shared.event_logs)
            try:
                answering = self._answer(data, clock, slot, attachment, scope, receive, send)
                await until_disconnect(receive, answering, attachment.leave)
            finally:
                del shared.in_flight[request_id]

    async def _answer(
        self,
        data: bytearray,
        clock: RequestClock,
        slot: QueueSlot,
        attachment: Attachment,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        shared, dialect, entry = self._shared, self._dialect, access_log.entry_of(scope)
        context = context_of(self._shared, scope, self._request_id(scope))
        async with clock.before_submit():
            request, summary = await self._parse(data, slot, context)
        entry.images, entry.videos = summary.num_images, summary.num_videos
        entry.documents, entry.pages = summary.num_documents, summary.num_pages
        entry.ignored, entry.model, model = summary.ignored, summary.model, summary.model
        entry.routing_key = entry.routing_key or summary.routing_key
        stream_wanted, num_choices = summary.stream, summary.num_choices
        entry.state = "waiting_for_model"
        render = dialect.renderer(context.request_id, model, summary.options)
        is_answer = summary.generates and not request.submit.count_only
        metrics = shared.metrics[model] if is_answer else ModelMetrics()  # else discarded
        recorder = entry.answer = AnswerRecorder(
            metrics, model, context.request_id, entry.received_at, is_stream=stream_wanted
        )
        if summary.generates:
            events = engine_events(shared, request, model, clock, entry, summary.keep_alive_seconds)
        else:
            events = self._touch(model, context.request_id, summary.keep_alive_seconds)
        log = self._log_of(summary, render, scope) if is_answer else None
        events = clock.watch(events, partial(_begin, slot, recorder, render, log))
        del request, summary  # frees the images during the answer
        with recorder:
            async with aclosing(answer(events, recorder)) as deltas:
                if log is not None:
                    async with attachment.to(log, send if stream_wanted else None):
                        if not stream_wanted:
                            await _accepted(render)(scope, receive, send)
                        await self._stream(deltas, render, scope, log.send, recorder, log)
                elif stream_wanted:
                    await self._stream(deltas, render, scope, send, recorder)
                else:
                    response = await whole_response(deltas, render, num_choices, recorder)
                    await response(scope, receive, send)

    def _log_of(self, summary: RequestSummary, render: Renderer, scope: Scope) -> EventLog | None:
        """A log for an answer in the background, or a stream that its client may resume."""
        shared, dialect, entry = self._shared, self._dialect, access_log.entry_of(scope)
        is_stream = summary.stream and dialect.content_type == sse.CONTENT_TYPE
        if not summary.background and not (
            is_stream and event_logs.is_wanted(Headers(scope=scope), shared.server)
        ):
            return None
        run = Run.of_current_task(
            keys.owner_of(scope),
            entry.request_id,
            dialect.name,
            lambda error: render.error(as_request_error(error, entry)),
            is_background=summary.background,
        )
        return shared.event_logs.open(run)

    def _request_id(self, scope: Scope) -> str:
        return f"{self._dialect.id_prefix}{access_log.entry_of(scope).request_id}"

    async def _touch(
        self, model: str, request_id: str, keep_alive_seconds: float | None
    ) -> AsyncGenerator[RequestEvent, None]:
        """The events of a request that only loads or unloads its model."""
        await self._shared.models.touch(model, request_id, keep_alive_seconds)
        yield Finished(request_id, Usage(0, 0))

    async def _stream(
        self,
        deltas: Answer,
        render: Renderer,
        scope: Scope,
        send: Send,
        recorder: AnswerRecorder,
        log: EventLog | None = None,
    ) -> None:
        """Send the answer as events; those of a `log` go there by `send`."""
        entry, shared = access_log.entry_of(scope), self._shared
        signs = KeepAlives(
            shared.models,
            shared.in_flight,
            self._dialect,
            render,
            entry,
            self._request_id(scope),
        )
        keep_alive, seconds = signs.of(Headers(scope=scope), shared.server)
        stream = EventStream(send, self._dialect.content_type, keep_alive, seconds)
        async with stream.kept_alive():
            if log is not None and log.run.is_background:
                assert isinstance(render, BackgroundRenderer)
                await stream.write(render.begin())
            await _send_events(deltas, render, stream, entry, recorder, holds_end=log is None)

    async def _parse(self, data: bytearray, slot: QueueSlot, context: Context) -> EncodedRequest:
        dialect, shared = self._dialect, self._shared
        parse = partial(shared.body_parser.parse, dialect.name, dialect.parse_on_thread, data)
        try:
            while True:
                try:
                    request = await parse(context)
                    slot.reserve(request.num_media_bytes)  # a name counts as often as it occurs
                    return request
                except BytesNeeded as needed:
                    reserve = slot.reserve_beside(len(data) + context.num_bytes)
                    contents = await shared.media.read(needed.urls, context.owner, reserve)
                    context = msgspec.structs.replace(context, given=contents)
                except PagesNeeded as needed:
                    reserve = slot.reserve_beside(len(data) + context.num_bytes)
                    pages = await shared.documents.draw(
                        needed.documents, context.owner, context.cache_salt, reserve
                    )
                    context = msgspec.structs.replace(context, pages=context.pages | pages)
                except HistoryNeeded as needed:
                    context = self._recall(context, needed, len(data))
                slot.reserve(len(data) + context.num_bytes)
        finally:
            body.discard(data)  # the caller still refers to it, perhaps for minutes

    def _recall(self, context: Context, needed: HistoryNeeded, body_bytes: int) -> Context:
        """`context` with the earlier turns. Raises PayloadTooLarge."""
        history, owner, response_id = self._history, context.owner, needed.response_id
        assert history is not None
        previous = () if response_id is None else history.recall(owner, response_id)
        other_items = tuple(
            items for response_id in needed.others for items in history.turn(owner, response_id)
        )
        limit = self._shared.limits.max_body_bytes
        if body_bytes + sum(map(len, previous + other_items)) > limit:
            raise PayloadTooLarge(
                f"The request and the turns before it are larger than {limit} bytes "
                "(`limits.max_body_bytes`).",
                "input" if response_id is None else "previous_response_id",
            )
        return msgspec.structs.replace(context, previous=previous, others=other_items)


async def engine_events(
    shared: Generation,
    request: EngineRequest,
    model: str,
    clock: RequestClock,
    entry: Entry,
    keep_alive_seconds: float | None = None,
) -> AsyncGenerator[RequestEvent, None]:
    """The events of the engine of `model`, which is loaded first if necessary."""
    models = shared.models
    async with models.lease(model, request.submit.request_id, keep_alive_seconds) as engine:
        entry.state = "sent"
        adapter = "" if models.base(model) is None else model
        events = engine.stream(request.to_engine(clock.remaining(), adapter))
        del request  # frees the images during the answer
        async with aclosing(events):
            async for event in events:
                yield event


async def resume(
    shared: Generation, dialect: str, event_id: str, scope: Scope, receive: Receive, send: Send
) -> None:
    """Send the rest of a stream. The body may be that of the first request: it is not used.

    Raises NotFound and InvalidRequest.
    """
    body.discard(await body.read(receive, shared.limits, shared.arriving))
    rest = shared.event_logs.resume(keys.owner_of(scope), dialect, event_id)
    await rest(scope, receive, send)


def context_of(shared: Generation, scope: Scope, request_id: str) -> Context:
    """The input of request parsing besides the body."""
    key = keys.key_of(scope)
    return Context(
        models=served_models.known_models(shared.models),
        request_id=request_id,
        cache_salt=key.identity if shared.settings.cache.separate_api_keys else "",
        client=key.name,
        owner=key.identity,
        is_admin=key.is_admin,
        limits=shared.limits,
        unknown_fields=shared.server.unknown_fields,
    )


def _accepted(render: Renderer) -> Response:
    """The response to a request that goes on in the background."""
    assert isinstance(render, BackgroundRenderer)
    return Response(render.accepted(), media_type="application/json")


def _begin(
    slot: QueueSlot, recorder: AnswerRecorder, render: Renderer, log: EventLog | None
) -> None:
    """The device begins with the request; later calls do nothing."""
    if recorder.has_begun:
        return
    slot.release_body()
    recorder.begin()
    if log is not None and log.run.is_background:
        assert isinstance(render, BackgroundRenderer)
        log.append(render.on_device())


async def _send_events(
    deltas: Answer,
    render: Renderer,
    stream: EventStream,
    entry: Entry,
    recorder: AnswerRecorder,
    *,
    holds_end: bool,
) -> None:
    """Send the answer as events; an error is raised before the first event, and sent after it.

    With `holds_end`, a delta with a finish reason is sent with the next event, so that a client
    that disconnects on the finish reason interrupts nothing.
    """
    held_events, unsent = b"", list[Delta]()
    try:
        async for event in deltas:
            if isinstance(event, Finished):
                await stream.end(held_events + render.end(event))
                recorder.record_deltas(unsent)
                return
            held_events += render.delta(event)
            unsent.append(event)
            if held_events and not (holds_end and event.finish_reason):
                await stream.write(held_events)
                recorder.record_deltas(unsent)
                held_events, unsent = b"", []
    except Exception as error:
        if not stream.started:
            raise
        recorder.reason = "error"
        await stream.end(held_events + render.error(as_request_error(error, entry)))
