"""Cores that are shared equally by all that works on them at a time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

import simpy


class Work:
    """Something that takes a core for so many seconds. `done` happens when it has got them."""

    __slots__ = ("done", "ends_at", "number")

    def __init__(self, done: simpy.Event, ends_at: float) -> None:
        self.done = done
        self.ends_at = ends_at
        self.number = -1


class Processor:
    """Processor sharing: of n pieces of work each gets `num_cores / n` of a core, at most one."""

    def __init__(self, env: simpy.Environment, num_cores: int = 1) -> None:
        self._env = env
        self._num_cores = num_cores
        self._speed = 1.0
        self._served = 0.0
        """Seconds that a piece of work got which was there from the beginning."""
        self._looked = env.now
        self._queue: list[tuple[float, int, Work]] = []
        self._num_works = 0
        self._numbers = count()
        self._alarm = 0
        self.on_change: Callable[[], None] | None = None
        """Called when it begins to work, and when it has nothing to do."""
        self.busy_seconds = 0.0
        """Of all cores together, until the last change."""

    @property
    def is_busy(self) -> bool:
        return self._num_works > 0

    def start(self, seconds: float) -> Work:
        """Begin with a piece of work that takes `seconds` of a core."""
        self._advance()
        work = Work(self._env.event(), self._served + max(0.0, seconds))
        self._num_works += 1
        self._push(work)
        if self._num_works == 1 and self.on_change:
            self.on_change()
        self._set_alarm()
        return work

    def seconds_left(self, work: Work) -> float:
        """Of a core, that it still wants."""
        self._advance()
        return max(0.0, work.ends_at - self._served)

    def shorten(self, work: Work, seconds_left: float) -> None:
        """Let it end when it has got so many seconds more."""
        self._advance()
        work.ends_at = self._served + seconds_left
        self._push(work)
        self._set_alarm()

    def set_speed(self, speed: float) -> None:
        """All cores work at `speed` from now on; 1 at first."""
        self._advance()
        self._speed = speed
        self._set_alarm()

    def _push(self, work: Work) -> None:
        work.number = next(self._numbers)
        heapq.heappush(self._queue, (work.ends_at, work.number, work))

    @property
    def _rate(self) -> float:
        """Seconds of a core that each piece of work gets in a second."""
        return self._speed * min(1.0, self._num_cores / max(1, self._num_works))

    def _advance(self) -> None:
        passed, self._looked = self._env.now - self._looked, self._env.now
        if self._num_works:
            self._served += passed * self._rate
            self.busy_seconds += passed * min(self._num_cores, self._num_works)

    def _set_alarm(self) -> None:
        """Look again when the next piece of work ends."""
        while self._queue and self._queue[0][1] != self._queue[0][2].number:
            heapq.heappop(self._queue)  # was shortened
        self._alarm += 1
        if self._queue:
            number = self._alarm
            wait = max(0.0, self._queue[0][0] - self._served) / self._rate
            alarm = self._env.timeout(wait)
            assert alarm.callbacks is not None
            alarm.callbacks.append(lambda _: self._end_next(number))

    def _end_next(self, alarm: int) -> None:
        if alarm != self._alarm:
            return
        self._advance()
        _, _, work = heapq.heappop(self._queue)
        self._num_works -= 1
        work.done.succeed()
        if not self._num_works and self.on_change:
            self.on_change()
        self._set_alarm()


def share_machine(processors: list[Processor], slowdown: float) -> None:
    """Let each be slower, by `slowdown` for each other one that works at the time."""

    def changed() -> None:
        num_busy = sum(one.is_busy for one in processors)
        for one in processors:
            others = num_busy - one.is_busy
            one.set_speed(1 / (1 + (slowdown - 1) * others))

    for one in processors:
        one.on_change = changed
