"""Refuses requests of a shape that crashed the engine again and again.

A request can crash the engine by what it allocates: a GPU out of memory ends the process, and no
code can catch that. If the client retries, it crashes the next engine too. So each crash is counted
against the loads on the device, but not against sequences that decoded there. One or two refuse
none: the process may have been killed, or another request was to blame. From the third on, a load
is refused for `engine.quarantine_seconds` by a crash with no other work on the device, such as
decoding; from the sixth on, by any. Only a success clears a load of its crashes, so their number is
bounded, however long engines take to start.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from vlm_server.errors import RequestTooCostly
from vlm_server.protocol import OnDevice
from vlm_server.supervisor.shape import (
    DeviceLoad,
    DiskReadLoad,
    EncoderLoad,
    PrefillLoad,
    RequestShape,
)

logger = logging.getLogger(__name__)

_CRASHES, _CRASHES_BESIDE_OTHERS = 3, 6
"""The crashes of a load from which on one refuses it: alone on the device, or beside other work."""
_MAX_LOADS = 512
_NOTHING = RequestShape()
_PHASES = {EncoderLoad: "encoding", PrefillLoad: "prefilling", DiskReadLoad: "reading from disk"}


@dataclass(slots=True)
class _Record:
    """The crashes of a load since its last success, and until when it is refused."""

    num_crashes: int = 0
    refused_until: float = -math.inf


class Quarantine:
    """Counts crashes by device load; refuses guilty loads for `seconds` (0: never)."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self.num_refused = 0
        self._seconds = seconds
        self._clock = clock
        self._shapes: dict[str, RequestShape] = {}
        """Shapes of running requests without a token, by id."""
        self._working: dict[str, tuple[RequestShape, set[DeviceLoad | None]]] = {}
        """The shape, and the loads on the device, by request; some may have been aborted since."""
        self._is_decoding = False
        self._done: dict[str, set[DeviceLoad | None]] = {}
        """Loads that the device had, of requests without a token."""
        self._records: dict[DeviceLoad, _Record] = {}

    @property
    def num_shapes(self) -> int:
        """Number of loads that are refused now; shapes in status and metrics."""
        return sum(self._seconds_left(load) > 0 for load in self._records)

    @property
    def num_tracked(self) -> int:
        return len(self._shapes)

    def check(self, shape: RequestShape) -> None:
        """Raises RequestTooCostly for a shape with a load that is refused."""
        for load in shape.loads:
            if (seconds := self._seconds_left(load)) > 0:
                self.num_refused += 1
                raise RequestTooCostly(
                    f"The engine crashed on requests of this size ({load}), again and again. "
                    f"Reduce it ({load.advice}), or try again in {math.ceil(seconds)} seconds.",
                    retry_after_seconds=seconds,
                )

    def admit(self, request_id: str, shape: RequestShape) -> None:
        """Record a request that is sent to the engine."""
        if shape.loads:
            self._shapes[request_id] = shape

    def record_work(self, event: OnDevice) -> None:
        """Record the work that the device has now; it replaces the last record."""
        shapes = {i: shape for i, (shape, _) in self._working.items()} | self._shapes
        self._working = {}
        self._is_decoding = event.is_decoding
        for request_id in event.request_ids:
            shape = shapes.get(request_id, _NOTHING)
            loads = _loads_on_device(shape, request_id, event)
            self._working[request_id] = shape, loads
            if request_id in self._shapes:
                self._done.setdefault(request_id, set()).update(loads)

    def record_success(self, request_id: str) -> None:
        """Clear the loads of a request that got a token, or its result: they did no harm."""
        for load in self._done.get(request_id, ()):
            if load is not None and self._records.pop(load, None) is not None:
                logger.info("a request with %s was answered: its crashes are forgotten", load)
        self.acquit(request_id)

    def acquit(self, request_id: str) -> None:
        """Take the blame from a request that has a token or has failed."""
        self.remove(request_id)
        self._working.pop(request_id, None)

    def remove(self, request_id: str) -> None:
        """Remove a request that ended. If aborted, the device may still work on its images."""
        self._shapes.pop(request_id, None)
        self._done.pop(request_id, None)

    def record_engine_end(self, *, is_crash: bool, only_encoder: bool = False) -> None:
        """Remove all requests; after a crash, blame the loads on the device, or in the encoder."""
        loads = set[DeviceLoad | None]().union(*(loads for _, loads in self._working.values()))
        if only_encoder:
            loads = {load for load in loads if isinstance(load, EncoderLoad)}
        is_alone = len(loads) == 1 and (only_encoder or not self._is_decoding)
        self._is_decoding = False
        self._shapes.clear()
        self._working.clear()
        self._done.clear()
        for load in loads if is_crash else ():
            if load is not None:
                self._record_crash(load, was_alone=is_alone)

    def _record_crash(self, load: DeviceLoad, *, was_alone: bool) -> None:
        logger.warning(
            "the engine crashed while it was %s %s%s",
            _PHASES[type(load)],
            load,
            "" if was_alone else ", beside others",
        )
        record = self._records.pop(load, _Record())
        record.num_crashes += 1
        if record.num_crashes >= (_CRASHES if was_alone else _CRASHES_BESIDE_OTHERS):
            record.refused_until = self._clock() + self._seconds
        self._records[load] = record
        if len(self._records) > _MAX_LOADS:
            del self._records[min(self._records, key=lambda load: self._records[load].num_crashes)]

    def _seconds_left(self, load: DeviceLoad) -> float:
        """The seconds for which `load` is still refused; 0 or less if it isn't."""
        record = self._records.get(load)
        return -math.inf if record is None else record.refused_until - self._clock()


def _loads_on_device(
    shape: RequestShape, request_id: str, event: OnDevice
) -> set[DeviceLoad | None]:
    """The loads of a request in the phases that `event` announces; None stands for small text."""
    phases = (
        (event.reading, shape.reading),
        (event.encoding, shape.encoding),
        (event.prefilling, shape.prefilling),
    )
    return {load for request_ids, load in phases if request_id in request_ids}
