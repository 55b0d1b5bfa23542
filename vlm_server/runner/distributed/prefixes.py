"""The prefix cache of several ranks: rank 0 decides, and each rank keeps its own heads' KV.

Rank 0 numbers the segments that it stores. Followers keep theirs under the same numbers, until rank
0 frees its own, and repeat rank 0's changes in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import mlx.core as mx

from vlm_server.cache.caches import Caches
from vlm_server.cache.kv_storage import EXACT, KVStorage
from vlm_server.cache.prefix import Source
from vlm_server.cache.prompt_key import PromptKey
from vlm_server.interfaces import NewRequest, SchedulerOutput
from vlm_server.protocol import SamplingParams
from vlm_server.runner.distributed.messages import RankPlan, SegmentRef, Split, Stored, Taken
from vlm_server.runner.kv.segments import KVSegment, LayerStates, SequenceState

# ---- rank 0 ------------------------------------------------------------------------------


@dataclass(slots=True)
class SegmentLog:
    """Changes of segments that followers do not know yet. dropped: filled by any thread."""

    numbers: count[int] = field(default_factory=count)
    changes: list[Taken | Split] = field(default_factory=list)
    dropped: deque[int] = field(default_factory=deque)

    def take_dropped(self) -> tuple[int, ...]:
        """Numbers of the segments that were freed since the last call."""
        return tuple(self.dropped.popleft() for _ in range(len(self.dropped)))


class NumberedSegment:
    """A `KVSegment` on rank 0, whose end is logged so that followers free theirs."""

    def __init__(self, log: SegmentLog, held: KVSegment) -> None:
        self._log = log
        self._held = held
        self.number = next(log.numbers)

    def __del__(self) -> None:
        self._log.dropped.append(self.number)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return self._held.arrays

    @property
    def size_bytes(self) -> int:
        return self._held.size_bytes

    def split(self, at: int) -> tuple[NumberedSegment, NumberedSegment]:
        """Copies of the first `at` tokens and of the rest."""
        first, rest = (NumberedSegment(self._log, half) for half in self._held.split(at))
        self._log.changes.append(Split(self.number, at, first.number, rest.number))
        return first, rest


class _NumberedState:
    """The `Source` of one sequence on rank 0, which logs the segments taken from it."""

    def __init__(self, log: SegmentLog, state: SequenceState) -> None:
        self._log = log
        self._state = state

    @property
    def snapshots(self) -> Mapping[int, LayerStates]:
        return self._state.snapshots

    def size_bytes(self, start: int, end: int) -> int:
        return self._state.size_bytes(start, end)

    def take(self, start: int, end: int) -> NumberedSegment:
        segment = NumberedSegment(self._log, self._state.take(start, end))
        self._log.changes.append(Taken(segment.number, start, end))
        return segment


class RankZeroPrefixes:
    """The `PrefixStore` of rank 0: its caches, whose changes it sends to followers."""

    def __init__(self, caches: Caches, send: Callable[[Stored], None], log: SegmentLog) -> None:
        self._caches = caches
        self._send = send
        self._log = log
        self.kv_storage = caches.kv_storage

    def store_prefix(self, prompt: PromptKey, source: Source[Any, Any], salt: str) -> None:
        """Sends the changes even if storing fails half-way."""
        assert isinstance(source, SequenceState)
        try:
            self._caches.store_prefix(prompt, _NumberedState(self._log, source), salt)
        finally:
            changes, self._log.changes = self._log.changes, []
            self._send(Stored(tuple(changes)))


# ---- followers -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """A prompt's stored prefix, for `restore`."""

    segments: tuple[tuple[KVSegment, int], ...] = ()
    snapshot: None = None

    @property
    def length(self) -> int:
        return sum(num_tokens for _, num_tokens in self.segments)


class FollowerPrefixes:
    """The `PrefixStore` of a follower, which repeats rank 0's changes for the same prompt."""

    def __init__(self, receive: Callable[[], Stored], kv_storage: KVStorage = EXACT) -> None:
        self._receive = receive
        self.kv_storage = kv_storage
        self._segments: dict[int, KVSegment] = {}

    def __len__(self) -> int:
        return len(self._segments)

    def store_prefix(self, prompt: PromptKey, source: Source[Any, Any], salt: str) -> None:
        for change in self._receive().changes:
            if isinstance(change, Taken):
                self._segments[change.number] = source.take(change.start, change.end)
            else:
                first, rest = self._segments[change.number].split(change.at)
                self._segments |= {change.first: first, change.rest: rest}

    def drop(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            self._segments.pop(number, None)  # missing if rank 0 failed to take it

    def plan_of(self, message: RankPlan) -> SchedulerOutput:
        """The plan for this rank's runner. Raises KeyError for an unknown segment."""
        new = [
            NewRequest(
                request_id=request.request_id,
                prompt=request.prompt,
                sampling=SamplingParams(n=request.n),
                prefix=self.prefix(request.prefix),
                features=request.features,
            )
            for request in message.new
        ]
        return SchedulerOutput(
            finished_seqs=message.finished_seqs,
            stored_prompts=message.stored_prompts,
            stored_answers=message.stored_answers,
            new=tuple(new),
            decode=message.decode,
            prefills=message.prefills,
        )

    def prefix(self, segments: tuple[SegmentRef, ...]) -> HeldPrefix:
        """The stored prefix of a prompt that begins with these segments."""
        return HeldPrefix(tuple((self._segments[s.number], s.num_tokens) for s in segments))
