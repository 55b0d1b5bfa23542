"""What the threads beside the inference thread have to do now. Knows kinds and names, no work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count


@dataclass(slots=True)
class _Work:
    number: int
    read_progress: Callable[[], int]
    progress: int


class AtWork:
    """Numbers pieces of work, so that the watchdog can tell which thread is stuck."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._begun: dict[str, dict[str, _Work]] = {}
        """By kind of thread: each piece of work, by its name."""

    def begin(self, kind: str, name: str, read_progress: Callable[[], int] = lambda: 0) -> None:
        """A piece of work is begun; each time that `read_progress` has changed it counts as new."""
        work = _Work(next(self._numbers), read_progress, read_progress())
        self._begun.setdefault(kind, {})[name] = work

    def end(self, kind: str, name: str) -> None:
        self._begun.get(kind, {}).pop(name, None)

    @property
    def is_anything(self) -> bool:
        return any(self._begun.values())

    def read_oldest(self) -> dict[str, int]:
        """The number of the oldest piece of work of each kind that has one."""
        for works in self._begun.values():
            for work in works.values():
                self._renew(work)
        return {
            kind: min(work.number for work in works.values())
            for kind, works in self._begun.items()
            if works
        }

    def _renew(self, work: _Work) -> None:
        progress = work.read_progress()
        if progress != work.progress:
            work.number, work.progress = next(self._numbers), progress
