"""The event streams of the requests that an engine has."""

from __future__ import annotations

import asyncio
import logging

from vlm_server.errors import EngineDied, RequestCancelled, RequestError
from vlm_server.protocol import Accepted, Failed, Finished, OnDevice, Tokens
from vlm_server.supervisor.engine_process.client import RequestEvent
from vlm_server.supervisor.quarantine import Quarantine
from vlm_server.supervisor.shape import RequestShape

logger = logging.getLogger(__name__)


class EngineStreams:
    """One stream of events per request, also reported to `Quarantine`.

    Its length is the number of streams. Use from one event loop.
    """

    def __init__(self, quarantine: Quarantine) -> None:
        self._quarantine = quarantine
        self._queues: dict[str, asyncio.Queue[RequestEvent]] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def open(self, request_id: str, shape: RequestShape) -> asyncio.Queue[RequestEvent]:
        """The queue of a request's events, until `close`. Raises RequestTooCostly."""
        self._quarantine.check(shape)
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
                    self._quarantine.record_success(delta.request_id)
                    self._put(delta.request_id, Tokens((delta,)))
            case Accepted():
                self._put(event.request_id, event)
            case Finished():
                if event.is_aborted:
                    self.remove(event.request_id)
                else:
                    self._quarantine.record_success(event.request_id)
                self._put(event.request_id, event)
            case Failed():
                self._quarantine.acquit(event.request_id)
                self._put(event.request_id, event)
            case OnDevice():
                logger.debug("the device works on %s", ", ".join(event.request_ids))
                self._quarantine.record_work(event)
                for request_id in event.request_ids:
                    self._put(request_id, event)

    def remove(self, request_id: str) -> None:
        """Record that the engine is done with a request."""
        self._quarantine.remove(request_id)

    def fail_all(self, *, is_crash: bool, only_encoder: bool) -> None:
        """Fail all requests, and blame what was on the device for a crash, or in the encoder."""
        self._quarantine.record_engine_end(is_crash=is_crash, only_encoder=only_encoder)
        error = EngineDied("The engine process ended during this request; please try again.")
        for request_id, queue in self._queues.items():
            queue.put_nowait(_failed_event(request_id, error))
        self._queues.clear()

    def _put(self, request_id: str, event: RequestEvent) -> None:
        if queue := self._queues.get(request_id):
            queue.put_nowait(event)


def _failed_event(request_id: str, error: RequestError) -> Failed:
    return Failed(request_id, error.code, error.message)
