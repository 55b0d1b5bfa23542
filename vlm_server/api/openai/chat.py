"""`POST /v1/chat/completions`: the order of the steps, from the queue slot to the last byte."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

import anyio
import anyio.to_thread
import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vlm_server.api.http import access_log, body, cache_salt, sse
from vlm_server.api.http.access_log import Entry
from vlm_server.api.http.disconnect import until_disconnect
from vlm_server.api.http.queue_slots import QueueSlots
from vlm_server.api.openai import errors
from vlm_server.api.openai.intake import ChatCall, read_chat
from vlm_server.api.openai.render import Renderer
from vlm_server.errors import EngineUnavailable, InternalError, RequestError
from vlm_server.protocol import Delta, Failed, Finished, TokenLogprob, Tokens
from vlm_server.settings import Limits
from vlm_server.supervisor.client import EngineClient, RequestEvent

_INTAKE_THREADS = 4

Answer = AsyncGenerator[Delta | Finished, None]


class ChatCompletions:
    """The endpoint, as an ASGI application.

    The engine's events are always closed and the queue slot released: if the client
    disconnects, the work is cancelled wherever it is, and its clean-up does both.
    """

    def __init__(self, engine: EngineClient, queue_slots: QueueSlots, limits: Limits) -> None:
        self._engine = engine
        self._queue_slots = queue_slots
        self._limits = limits
        self._intake = anyio.CapacityLimiter(_INTAKE_THREADS)

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
        call = await self._read_call(data, f"chatcmpl-{entry.request_id}", cache_salt.of(scope))
        data.clear()  # the caller still holds it, and the answer may take minutes
        entry.images, entry.videos = len(call.submit.images), len(call.submit.videos)
        model = self._engine.status.model_name
        render = Renderer(call.submit.request_id, model, call.include_usage)
        is_stream, events = call.stream, self._engine.stream(call.submit)
        num_choices = call.submit.sampling.n
        del call  # frees the images while the engine answers
        async with aclosing(_events(events, entry)) as answer:
            if is_stream:
                await _stream(answer, render, sse.EventStream(send), entry)
            else:
                response = Response(
                    await _whole(answer, render, num_choices), media_type="application/json"
                )
                await response(scope, receive, send)

    async def _read_call(self, data: bytearray, request_id: str, salt: str) -> ChatCall:
        model = self._engine.status.model_name
        read = partial(read_chat, data, self._limits, model, request_id, salt)
        return await anyio.to_thread.run_sync(read, limiter=self._intake)


async def _events(events: AsyncGenerator[RequestEvent, None], entry: Entry) -> Answer:
    """The deltas with text or a finish reason, then `Finished`. Raises RequestError.

    Logprobs of tokens without text are added to the choice's next delta. The engine's events
    are closed before `Finished` is passed on, so that a client that disconnects as soon as it
    has its answer aborts nothing.
    """
    ending: Finished | Failed | None = None
    held: dict[int, tuple[TokenLogprob, ...]] = {}
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Tokens):
                for delta in event.deltas:
                    logprobs = held.pop(delta.choice, ()) + delta.logprobs
                    if not (delta.text or delta.finish_reason):
                        held[delta.choice] = logprobs
                        continue
                    if delta.text:
                        entry.first_text()
                    yield msgspec.structs.replace(delta, logprobs=logprobs)
            elif isinstance(event, Finished | Failed):
                ending = event
    yield _checked(ending, entry)


def _checked(ending: Finished | Failed | None, entry: Entry) -> Finished:
    """The `Finished` of a complete answer. Raises RequestError for anything else."""
    if ending is None:
        raise InternalError("The engine's answer is incomplete.")
    if isinstance(ending, Failed):
        raise RequestError.from_code(ending.code, ending.message, ending.param)
    if ending.is_aborted:
        raise EngineUnavailable("The engine aborted this request.")
    entry.completion_tokens = ending.usage.completion_tokens
    return ending


async def _whole(answer: Answer, render: Renderer, num_choices: int) -> bytes:
    choices: list[list[Delta]] = [[] for _ in range(num_choices)]
    async for event in answer:
        if isinstance(event, Finished):
            return render.completion(choices, event)
        choices[event.choice].append(event)
    raise InternalError("The engine's answer is incomplete.")


async def _stream(answer: Answer, render: Renderer, stream: sse.EventStream, entry: Entry) -> None:
    """Send the answer as events. Errors are raised until the first event, sent as one after it.

    The chunk with a choice's finish reason is sent together with what comes next, the last one
    with `[DONE]`: a client that disconnects when it sees it interrupts nothing.
    """
    chunks: list[bytes] = []
    begun: set[int] = set()
    try:
        async for event in answer:
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
        await stream.end(sse.event(errors.encode(_as_request_error(error, entry))))


def _as_request_error(error: Exception, entry: Entry) -> RequestError:
    if not isinstance(error, RequestError):
        access_log.logger.error("id=%s failed unexpectedly", entry.request_id, exc_info=error)
        error = InternalError("The server failed.")
    entry.error_code = error.code
    return error
