"""Which worker a conversation goes to: one that is there."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Mapping, Sequence
from enum import Enum
from hashlib import blake2b
from itertools import count

from scripts.simulation.worker import Worker

_POINTS = 160
"""Of each worker on the ring."""


class Policy(Enum):
    """`KEY` is consistent hashing of the conversation's key; the others know no conversations."""

    KEY = "consistent hashing"
    ROUND_ROBIN = "round robin"
    RANDOM = "random"


class Gateway:
    """`assigned` says of some keys where they go, as long as that worker is there."""

    def __init__(
        self,
        workers: Sequence[Worker],
        policy: Policy = Policy.KEY,
        assigned: Mapping[str, int] | None = None,
        seed: int = 0,
    ) -> None:
        self.workers = workers
        self._policy = policy
        self._assigned = assigned or {}
        self._random = random.Random(seed)
        self._turns = count()
        ring = [(_hash(f"{w.name} {i}"), w) for w in workers for i in range(_POINTS)]
        self._ring = sorted(ring, key=lambda point: point[0])
        self._places = [place for place, _ in self._ring]

    def choose(self, key: str) -> Worker:
        """Raises RuntimeError if all are lost."""
        there = [worker for worker in self.workers if not worker.is_lost]
        if not there:
            raise RuntimeError("all workers are lost")
        if self._policy is Policy.RANDOM:
            return self._random.choice(there)
        if self._policy is Policy.ROUND_ROBIN:
            return there[next(self._turns) % len(there)]
        assigned = self._assigned.get(key)
        if assigned is not None and not self.workers[assigned].is_lost:
            return self.workers[assigned]
        return self._on_ring(key)

    def _on_ring(self, key: str) -> Worker:
        """The next worker on the ring that is there."""
        place = bisect(self._places, _hash(key))
        while True:
            worker = self._ring[place % len(self._ring)][1]
            if not worker.is_lost:
                return worker
            place += 1


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())
