"""The answer to a request, made from its engine's events: deltas, then the end or an error."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import anyio.to_thread
import msgspec
from starlette.responses import Response

from vlm_server.api.http import access_log
from vlm_server.api.http.access_log import Entry
from vlm_server.api.http.dialect import Renderer
from vlm_server.api.http.recorder import AnswerRecorder
from vlm_server.errors import EngineUnavailable, InternalError, RequestError
from vlm_server.protocol import Delta, Failed, Finished, Times, TokenLogprob, Tokens, TokenText
from vlm_server.supervisor.engine_process.client import RequestEvent

Answer = AsyncGenerator[Delta | Finished, None]

_SMALL_VECTORS_BYTES = 64 << 10
"""Vectors whose JSON takes about a millisecond."""
_IMPOSSIBLE_LOGPROB = -9999.0
"""OpenAI's value for minus infinity, which JSON does not have."""


async def answer(events: AsyncGenerator[RequestEvent, None], recorder: AnswerRecorder) -> Answer:
    """The non-empty deltas of the answer, then `Finished`. Raises RequestError.

    Logprobs of tokens without text are added to the choice's next delta. The engine's events
    are closed before `Finished` is yielded, so that a client that disconnects after its answer
    aborts nothing.
    """
    ending: Finished | Failed | None = None
    logprobs_by_choice: dict[int, tuple[TokenLogprob, ...]] = {}
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Tokens):
                for delta in event.deltas:
                    logprobs = logprobs_by_choice.pop(delta.choice, ()) + delta.logprobs
                    if not (delta.text or delta.tool_call or delta.finish_reason):
                        logprobs_by_choice[delta.choice] = logprobs
                        continue
                    if delta.finish_reason:
                        recorder.finish_reasons[delta.choice] = delta.finish_reason
                    yield msgspec.structs.replace(delta, logprobs=logprobs)
            elif isinstance(event, Finished | Failed):
                ending = event
    yield _check_ending(ending, recorder)


async def collect_answer(
    answer: Answer, num_choices: int, recorder: AnswerRecorder
) -> tuple[list[list[Delta]], Finished]:
    """The deltas of each choice, and the end. Raises RequestError."""
    choices: list[list[Delta]] = [[] for _ in range(num_choices)]
    async for event in answer:
        if isinstance(event, Finished):
            return choices, event
        choices[event.choice].append(event)
        recorder.record_deltas((event,))
    raise InternalError("The engine's answer is incomplete.")


async def whole_response(
    deltas: Answer, render: Renderer, num_choices: int, recorder: AnswerRecorder
) -> Response:
    """The answer in one piece. Raises RequestError."""
    content = await _whole(render, *await collect_answer(deltas, num_choices, recorder))
    headers = {"Server-Timing": recorder.server_timing(time.monotonic())}
    return Response(content, headers=headers, media_type="application/json")


async def _whole(render: Renderer, choices: Sequence[Sequence[Delta]], finished: Finished) -> bytes:
    """The whole answer; that of many vectors is encoded on a thread, for it takes long."""
    encode = partial(render.whole, choices, finished)
    if sum(len(vectors.data) for vectors in finished.vectors) <= _SMALL_VECTORS_BYTES:
        return encode()
    return await anyio.to_thread.run_sync(encode)


def json_response(value: object) -> Response:
    """`value` as a response, by msgspec, which knows structs and raw JSON."""
    return Response(msgspec.json.encode(value), media_type="application/json")


def as_request_error(error: Exception, entry: Entry) -> RequestError:
    """`error` as one to send in the middle of a stream; an unexpected error is logged."""
    if not isinstance(error, RequestError):
        access_log.logger.error("id=%s failed unexpectedly", entry.request_id, exc_info=error)
        error = InternalError("The server failed.")
    entry.fail(error)
    return error


def as_finite(logprob: float) -> float:
    """`logprob`, or -9999 if it is infinite or NaN."""
    return logprob if math.isfinite(logprob) else _IMPOSSIBLE_LOGPROB


def token_logprob(entry: TokenLogprob, *, empty_top: bool = True) -> dict[str, Any]:
    """The JSON of a sampled token's logprobs, in OpenAI's form, which all dialects use.

    Without `empty_top` an empty `top_logprobs` is left out.
    """
    top = [_token(token) for token in entry.top]
    return _token(entry.token) | ({"top_logprobs": top} if top or empty_top else {})


def _token(token: TokenText) -> dict[str, Any]:
    """The JSON of a token; `bytes` is its text in UTF-8, perhaps a part of a character."""
    return {"token": token.text, "logprob": as_finite(token.logprob), "bytes": list(token.utf8)}


def _check_ending(ending: Finished | Failed | None, recorder: AnswerRecorder) -> Finished:
    """The `Finished` of a complete answer. Raises RequestError for anything else."""
    if ending is None:
        raise InternalError("The engine's answer is incomplete.")
    if isinstance(ending, Failed):
        raise RequestError.from_code(ending.code, ending.message, ending.param)
    if ending.is_aborted:
        raise EngineUnavailable("The engine aborted this request.")
    recorder.finish(ending)
    total_seconds = time.monotonic() - recorder.received_at
    first_at = recorder.first_at
    first_seconds = total_seconds if first_at is None else first_at - recorder.received_at
    return msgspec.structs.replace(ending, times=Times(first_seconds, total_seconds))
