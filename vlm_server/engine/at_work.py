"""What the threads beside the inference thread have to do now. Knows kinds and names, no work."""

from __future__ import annotations

from itertools import count


class AtWork:
    """Numbers pieces of work, so that somebody who is told the oldest ones sees which hang."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._begun: dict[str, dict[str, int]] = {}
        """By kind of thread: the number of each piece of work, oldest first, by its name."""

    def begin(self, kind: str, name: str) -> None:
        self._begun.setdefault(kind, {})[name] = next(self._numbers)

    def end(self, kind: str, name: str) -> None:
        self._begun.get(kind, {}).pop(name, None)

    @property
    def oldest(self) -> dict[str, int]:
        """The number of the oldest piece of work of each kind that has one."""
        return {kind: next(iter(begun.values())) for kind, begun in self._begun.items() if begun}
