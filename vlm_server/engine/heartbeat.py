"""Signs of life of the preparer and encoder threads, for the watchdog."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count


@dataclass(slots=True)
class _Task:
    number: int
    read_progress: Callable[[], int]
    progress: int


class Heartbeat:
    """Numbers of the tasks of threads: a thread whose oldest task keeps its number is stuck."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._tasks: dict[str, dict[str, _Task]] = {}
        """Tasks by name, by kind of thread."""

    def start(self, kind: str, name: str, read_progress: Callable[[], int] = lambda: 0) -> None:
        """Number a task; it gets a new number whenever `read_progress` has changed."""
        task = _Task(next(self._numbers), read_progress, read_progress())
        self._tasks.setdefault(kind, {})[name] = task

    def finish(self, kind: str, name: str) -> None:
        """Drop a task; an unknown one is no error."""
        self._tasks.get(kind, {}).pop(name, None)

    @property
    def has_work(self) -> bool:
        """Whether any thread has a task."""
        return any(self._tasks.values())

    def read_oldest(self) -> dict[str, int]:
        """The number of the oldest task, by kind of thread."""
        for tasks in self._tasks.values():
            for task in tasks.values():
                self._renew(task)
        return {
            kind: min(task.number for task in tasks.values())
            for kind, tasks in self._tasks.items()
            if tasks
        }

    def _renew(self, task: _Task) -> None:
        progress = task.read_progress()
        if progress != task.progress:
            task.number, task.progress = next(self._numbers), progress
