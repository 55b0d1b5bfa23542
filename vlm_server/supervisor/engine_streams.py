"""The event streams of the requests that an engine has."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from vlm_server.errors import EngineDied, EngineUnavailable, RequestCancelled, RequestError
from vlm_server.protocol import Accepted, Failed, Finished, OnDevice, Tokens
from vlm_server.supervisor.engine_process.client import RequestEvent
from vlm_server.supervisor.quarantine import Quarantine
from vlm_server.supervisor.shape import RequestShape

_PATIENCE_SECONDS = 10.0
"""Time that a trial, and requests after it, wait for running answers. Then it runs with them:
the device survived their prefill."""
_MAX_SECONDS = 30.0
"""Further time that it waits for requests without a token."""


class Trials:
    """Runs suspect requests alone, while later ones wait. For use from one event loop only."""

    def __init__(self) -> None:
        self.request_id: str | None = None
        """The request on trial, or waiting to be tried."""
        self._starting: set[str] = set()
        """Requests that the engine has and that have no token yet."""
        self._answering: set[str] = set()
        self._changed = asyncio.Event()

    async def wait_for_turn(self, request_id: str, is_suspect: Callable[[], bool]) -> bool:
        """Wait until a request may be sent; returns whether it is tried alone.

        `is_suspect` is called once no other trial is under way; its errors are raised.
        """
        while self.request_id is not None:
            await self._changed.wait()
        is_alone = is_suspect()
        if is_alone:
            self.request_id = request_id
            try:
                await self._wait_for_others()
            except BaseException:
                self.remove(request_id)
                raise
        self._starting.add(request_id)
        return is_alone

    def record_token(self, request_id: str) -> None:
        """Record a request's first token, which ends its trial."""
        if request_id in self._starting:
            self._answering.add(request_id)
            self._end_trial(request_id)

    def remove(self, request_id: str) -> None:
        """Record that the engine is done with a request."""
        self._answering.discard(request_id)
        self._end_trial(request_id)

    def clear(self) -> None:
        """Remove all requests, and let waiting ones proceed."""
        self._starting.clear()
        self._answering.clear()
        self.request_id = None
        self._notify()

    async def _wait_for_others(self) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                while self._starting or self._answering:
                    await self._changed.wait()
        except TimeoutError:
            await self._wait_for_starting()

    async def _wait_for_starting(self) -> None:
        """Raises EngineUnavailable after `_MAX_SECONDS`: all later requests wait, too."""
        try:
            async with asyncio.timeout(_MAX_SECONDS):
                while self._starting:
                    await self._changed.wait()
        except TimeoutError:
            raise EngineUnavailable(
                "Requests of this size have crashed the engine, and the server has no time to try "
                "one alone; try again later."
            ) from None

    def _end_trial(self, request_id: str) -> None:
        self._starting.discard(request_id)
        if self.request_id == request_id:
            self.request_id = None
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


logger = logging.getLogger(__name__)


class EngineStreams:
    """One stream of events per request, also reported to `Quarantine` and `Trials`.

    Its length is the number of streams. Use from one event loop.
    """

    def __init__(self, quarantine: Quarantine) -> None:
        self._quarantine = quarantine
        self._trials = Trials()
        self._queues: dict[str, asyncio.Queue[RequestEvent]] = {}

    def __len__(self) -> int:
        return len(self._queues)

    async def open(self, request_id: str, shape: RequestShape) -> asyncio.Queue[RequestEvent]:
        """Wait until a request may be sent; returns the queue of its events, until `close`.

        Raises RequestTooCostly if it is refused, and EngineUnavailable: see `Trials.wait_for_turn`.
        """
        await self._trials.wait_for_turn(request_id, partial(self._is_suspect, shape))
        self._quarantine.admit(request_id, shape)
        queue = self._queues[request_id] = asyncio.Queue[RequestEvent]()
        return queue

    def close(self, request_id: str) -> bool:
        """Stop tracking a request; returns whether it was tracked."""
        return self._queues.pop(request_id, None) is not None

    def cancel(self, request_id: str) -> bool:
        """Close a stream with `Failed(code="request_cancelled")`; False if there is none."""
        queue = self._queues.pop(request_id, None)
        if queue is None:
            return False
        error = RequestCancelled("The request was cancelled by the server's operator.")
        queue.put_nowait(_failed_event(request_id, error))
        return True

    def deliver(self, event: RequestEvent) -> None:
        """Deliver an event of the engine, of one request or of several."""
        match event:
            case Tokens(deltas):
                for delta in deltas:
                    self._quarantine.record_token(delta.request_id)
                    self._trials.record_token(delta.request_id)
                    self._put(delta.request_id, Tokens((delta,)))
            case Accepted():
                self._put(event.request_id, event)
            case Finished():
                self.remove(event.request_id)
                self._put(event.request_id, event)
            case Failed():
                self._quarantine.acquit(event.request_id)
                self.remove(event.request_id)
                self._put(event.request_id, event)
            case OnDevice(request_ids):
                logger.debug("the device works on %s", ", ".join(request_ids))
                self._quarantine.record_work(event)
                for request_id in request_ids:
                    self._put(request_id, event)

    def remove(self, request_id: str) -> None:
        """Record that the engine is done with a request."""
        self._trials.remove(request_id)
        self._quarantine.remove(request_id)

    def fail_all(self, *, is_crash: bool, only_encoder: bool) -> None:
        """Fail all requests, and blame what was on the device for a crash, or in the encoder."""
        self._quarantine.record_engine_end(
            is_crash=is_crash, trial_id=self._trials.request_id, only_encoder=only_encoder
        )
        self._trials.clear()
        error = EngineDied("The engine process ended during this request; please try again.")
        for request_id, queue in self._queues.items():
            queue.put_nowait(_failed_event(request_id, error))
        self._queues.clear()

    def _is_suspect(self, shape: RequestShape) -> bool:
        self._quarantine.check(shape)
        return self._quarantine.is_suspect(shape)

    def _put(self, request_id: str, event: RequestEvent) -> None:
        if queue := self._queues.get(request_id):
            queue.put_nowait(event)


def _failed_event(request_id: str, error: RequestError) -> Failed:
    return Failed(request_id, error.code, error.message)
