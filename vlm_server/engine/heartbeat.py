"""Signs of life of the threads beside the inference thread, for the watchdog."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count


@dataclass(slots=True)
class _Work:
    number: int
    read_progress: Callable[[], int]
    progress: int


class Heartbeat:
    """Numbers of the pieces of work that threads have: a thread whose number stays is stuck."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._works: dict[str, dict[str, _Work]] = {}
        """By kind of thread: each piece of work, by its name."""

    def start(self, kind: str, name: str, read_progress: Callable[[], int] = lambda: 0) -> None:
        """Number a piece of work; it gets a new number whenever `read_progress` has changed."""
        work = _Work(next(self._numbers), read_progress, read_progress())
        self._works.setdefault(kind, {})[name] = work

    def finish(self, kind: str, name: str) -> None:
        """Forget a piece of work; one that is unknown is no error."""
        self._works.get(kind, {}).pop(name, None)

    @property
    def is_needed(self) -> bool:
        """Whether any thread has work."""
        return any(self._works.values())

    def read_oldest(self) -> dict[str, int]:
        """The number of the oldest piece of work of each kind that has one."""
        for works in self._works.values():
            for work in works.values():
                self._renew(work)
        return {
            kind: min(work.number for work in works.values())
            for kind, works in self._works.items()
            if works
        }

    def _renew(self, work: _Work) -> None:
        progress = work.read_progress()
        if progress != work.progress:
            work.number, work.progress = next(self._numbers), progress
