"""A watchdog for an engine, or one kind of its threads, that makes no progress.

Its clock stops while nothing is due from the engine, and while the front itself is stopped
(`docker pause`, a debugger) and can't receive events.
"""

from __future__ import annotations

from collections.abc import Callable

from vlm_server.protocol import Event, Stats

INFERENCE = "inference"
"""The thread that sends all events. `Stats.at_work` names the others."""


class Watchdog:
    """The time since each kind of thread last made progress on due work.

    `tick` is to be called every `tick_seconds`; longer gaps count as one tick.
    """

    def __init__(self, tick_seconds: float, clock: Callable[[], float]) -> None:
        self._tick_seconds = tick_seconds
        self._clock = clock
        self._ticked_at = clock()
        self._owed: set[str] = set()
        """Requests that were sent to the engine and have not ended."""
        self._silence = 0.0
        self._ages: dict[tuple[str, int], float] = {}
        """Seconds since a kind of thread began its oldest piece of work, by kind and number."""

    @property
    def owed(self) -> frozenset[str]:
        """Requests without a terminal event, even if their clients have left."""
        return frozenset(self._owed)

    def record_request(self, request_id: str) -> None:
        """Record a request sent to the engine. It does not excuse silence about older work."""
        self._owed.add(request_id)

    def record_end(self, request_id: str) -> None:
        """Record that the engine is done with a request."""
        self._owed.discard(request_id)
        self._rest_if_nothing_is_due()

    def record_event(self, event: Event) -> None:
        """Record an event of the inference thread."""
        self._silence = 0.0
        if isinstance(event, Stats):
            ages = {work: age for work, age in self._ages.items() if work in event.at_work.items()}
            self._ages = dict.fromkeys(event.at_work.items(), 0.0) | ages
            self._rest_if_nothing_is_due()

    def tick(self) -> None:
        """Let the time pass since the last tick."""
        now = self._clock()
        elapsed_seconds, self._ticked_at = now - self._ticked_at, now
        counted_seconds = (
            elapsed_seconds if 0 <= elapsed_seconds < 2 * self._tick_seconds else self._tick_seconds
        )
        if self._is_anything_due:
            self._silence += counted_seconds
            self._ages = {work: age + counted_seconds for work, age in self._ages.items()}

    @property
    def overdue_seconds(self) -> tuple[float, str]:
        """The longest time without progress on due work, and the kind of thread that owes it."""
        ages = [(age, kind) for (kind, _), age in self._ages.items()]
        return max([(self._silence, INFERENCE), *ages])

    @property
    def _is_anything_due(self) -> bool:
        return bool(self._owed or self._ages)

    def _rest_if_nothing_is_due(self) -> None:
        if not self._is_anything_due:
            self._silence = 0.0
