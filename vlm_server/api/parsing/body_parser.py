"""Bodies parsed off the event loop: small texts on a thread, everything else in a process.

Parsing large bodies (JSON, base64, hashes, image headers) is work on hostile bytes that holds the
GIL, so none of it is done in the front. A process is killed when its client leaves, and when it
takes too long. Text never waits for media; media wait for at most one large body, and API keys
take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial

import anyio
import anyio.to_thread

from vlm_server.api.fair_turns import FairTurns
from vlm_server.api.parsing import json_body
from vlm_server.api.parsing.parsed_request import (
    Context,
    EncodedRequest,
    ParseOnThread,
    ParsingJob,
    decode_outcome,
    encode_request,
    with_body,
)
from vlm_server.errors import EngineUnavailable, RequestTooCostly
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.platform.child.messages import Parts
from vlm_server.platform.child.pool import ChildFailed, ChildNotStarted, ChildPool, ChildTimeout
from vlm_server.settings import MIB, Limits

logger = logging.getLogger(__name__)

MODULE = "vlm_server.api.parsing.process"
LARGE_BYTES = 16 * MIB
_TEXT_THREADS = 4
_TRIES = 2
"""Attempts at a body: a process may also be killed because the machine is short of memory."""


def start_pool(limits: Limits) -> ChildPool:
    """The processes for `BodyParser`, started on demand or warmed up."""
    # Twice a body and its text of four bytes per character; twice an image's canvas.
    memory_bytes = 512 * MIB + 10 * limits.max_body_bytes + 12 * limits.max_image_pixels
    seconds = limits.parsing_timeout_seconds
    size = limits.max_parsing_processes
    return ChildPool(MODULE, size, str(memory_bytes), str(seconds), memory_bytes=memory_bytes)


class BodyParser:
    """Parses bodies into requests for the engine. Use from one event loop."""

    def __init__(self, pool: ChildPool, limits: Limits) -> None:
        self._pool = pool
        self._seconds = limits.parsing_timeout_seconds
        self._turns = FairTurns(limits.max_parsing_processes)
        self._large_turns = FairTurns(max(1, limits.max_parsing_processes - 1))
        self._text_threads = anyio.CapacityLimiter(_TEXT_THREADS)
        self._waiting_threads = anyio.CapacityLimiter(limits.max_parsing_processes)

    async def parse(
        self, dialect: str, parse_on_thread: ParseOnThread, body: bytearray, context: Context
    ) -> EncodedRequest:
        """The request in `body`, in `dialect`. Cancelling ends the work immediately.

        Raises RequestError; BytesNeeded, PagesNeeded or HistoryNeeded for what `context` lacks.
        """
        if json_body.is_small(body):
            parse = partial(parse_on_thread, body, context)
            outcome = await anyio.to_thread.run_sync(parse, limiter=self._text_threads)
            if outcome is not None:
                return encode_request(outcome)
        is_large = len(body) + context.num_bytes > LARGE_BYTES
        large_turn = self._large_turns.turn(context.owner) if is_large else contextlib.nullcontext()
        async with large_turn, self._turns.turn(context.owner):
            return await self._in_process(ParsingJob(dialect, context), body)

    async def _in_process(self, job: ParsingJob, body: bytearray) -> EncodedRequest:
        cancellation = Cancellation()
        run = partial(self._run, job, body, cancellation)
        work = asyncio.ensure_future(anyio.to_thread.run_sync(run, limiter=self._waiting_threads))
        try:
            return await asyncio.shield(work)
        finally:
            if not work.done():
                cancellation.cancel()
                await asyncio.gather(work, return_exceptions=True)

    def _run(self, job: ParsingJob, body: bytearray, cancellation: Cancellation) -> EncodedRequest:
        """Parse `body` in a process, for which this thread waits."""
        try:
            return decode_outcome(self._answer(with_body(job, body), cancellation))
        except ChildNotStarted as error:
            logger.warning("a process that reads bodies %s", error)
            raise EngineUnavailable("The server is short of processes; try again later.") from None
        except ChildTimeout:
            logger.warning("reading a body took more than %g s", self._seconds)
            raise RequestTooCostly(
                f"Reading the request took more than {self._seconds:g} seconds "
                "(limits.parsing_timeout_seconds)."
            ) from None
        except ChildFailed as error:
            logger.warning("reading a body failed %d times: the process %s", _TRIES, error)
            raise RequestTooCostly("The request can't be read: it takes too much memory.") from None
        finally:
            with contextlib.suppress(ChildFailed):
                self._pool.warm_up()

    def _answer(self, job: Parts, cancellation: Cancellation) -> bytearray:
        for _ in range(_TRIES - 1):
            with contextlib.suppress(ChildFailed):
                return self._pool.run(job, self._seconds, cancellation)
        return self._pool.run(job, self._seconds, cancellation)
