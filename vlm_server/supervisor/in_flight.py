"""The requests that an engine has: who waits for their events, and what they may be blamed for."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from vlm_server.errors import EngineDied, RequestCancelled, RequestError
from vlm_server.protocol import Accepted, Failed, Finished, Tokens, Working
from vlm_server.supervisor.client import RequestEvent
from vlm_server.supervisor.crashes.quarantine import Quarantine
from vlm_server.supervisor.crashes.shape import Shape
from vlm_server.supervisor.crashes.trials import Trials

logger = logging.getLogger(__name__)


class EngineStreams:
    """Hands each stream the events of its request; has `Quarantine` and `Trials` learn from all.

    Its length is the number of streams. Knows nothing of the process. Use from one event loop.
    """

    def __init__(self, quarantine: Quarantine) -> None:
        self._quarantine = quarantine
        self._trials = Trials()
        self._queues: dict[str, asyncio.Queue[RequestEvent]] = {}

    def __len__(self) -> int:
        return len(self._queues)

    async def turn(self, request_id: str, shape: Shape) -> bool:
        """Wait until a request may be sent; whether it is then tried alone.

        Raises RequestTooCostly if it is refused, and EngineUnavailable: see `Trials.turn`.
        """
        return await self._trials.turn(request_id, partial(self._is_suspect, shape))

    def open(self, request_id: str) -> asyncio.Queue[RequestEvent]:
        """Where the events of a request will come, until `close`."""
        queue = self._queues[request_id] = asyncio.Queue[RequestEvent]()
        return queue

    def close(self, request_id: str) -> bool:
        """Nobody waits for its events any more. Whether somebody did."""
        return self._queues.pop(request_id, None) is not None

    def cancel(self, request_id: str) -> bool:
        """Close a stream with `Failed(code="request_cancelled")`; False if there is none."""
        queue = self._queues.pop(request_id, None)
        if queue is None:
            return False
        error = RequestCancelled("The request was cancelled by who operates this server.")
        queue.put_nowait(_failed(request_id, error))
        return True

    def admit(self, request_id: str, shape: Shape, *, alone: bool) -> None:
        """The engine gets a request; `alone`: until its first token, nothing else to do."""
        self._quarantine.admit(request_id, shape, alone=alone)

    def take(self, event: RequestEvent) -> None:
        """The engine said this: of one request, or of several at once."""
        match event:
            case Tokens(deltas):
                for delta in deltas:
                    self._quarantine.succeeded(delta.request_id)
                    self._trials.answering(delta.request_id)
                    self._deliver(delta.request_id, Tokens((delta,)))
            case Accepted():
                self._deliver(event.request_id, event)
            case Finished():
                self.ended(event.request_id)
                self._deliver(event.request_id, event)
            case Failed():
                self._quarantine.acquit(event.request_id)
                self.ended(event.request_id)
                self._deliver(event.request_id, event)
            case Working(request_ids):
                logger.debug("the device works on %s", ", ".join(request_ids))
                self._quarantine.working(event)
                for request_id in request_ids:
                    self._deliver(request_id, event)

    def ended(self, request_id: str) -> None:
        """The engine has nothing more to do for a request."""
        self._trials.ended(request_id)
        self._quarantine.finish(request_id)

    def engine_ended(self, *, is_crash: bool, only_encoder: bool) -> None:
        """Fail all requests, and blame what was on the device for a crash, or in the encoder."""
        self._quarantine.engine_ended(is_crash=is_crash, only_encoder=only_encoder)
        self._trials.engine_ended()
        error = EngineDied("The engine process ended during this request; please try again.")
        for request_id, queue in self._queues.items():
            queue.put_nowait(_failed(request_id, error))
        self._queues.clear()

    def _is_suspect(self, shape: Shape) -> bool:
        self._quarantine.check(shape)
        return self._quarantine.is_suspect(shape)

    def _deliver(self, request_id: str, event: RequestEvent) -> None:
        if queue := self._queues.get(request_id):
            queue.put_nowait(event)


def _failed(request_id: str, error: RequestError) -> Failed:
    return Failed(request_id, error.code, error.message)
