"""The prefix cache: a `RadixTree` of prompts with a lock, counters and insertion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from vlm_server.cache.lru import MemoryCache
from vlm_server.cache.prompt_key import PromptKey
from vlm_server.cache.radix_tree import Node, RadixTree, S, Segment, Snapshot, T

_MAX_MERGED_BYTES = 256 << 20
"""The maximum size of a merged part: the copy takes memory in addition to the original."""
_DROPPED_SHARE = 1 / 8
"""The maximum size, relative to the prompt, of abandoned answers that merging drops."""

T_co = TypeVar("T_co", bound=Segment, covariant=True)
S_co = TypeVar("S_co", bound=Snapshot, covariant=True)


class Source(Protocol[T_co, S_co]):
    """The state of a prompt, to store in a cache."""

    @property
    def snapshots(self) -> Mapping[int, S_co]:
        """Snapshots by the number of positions before them."""

    def size_bytes(self, start: int, end: int) -> int:
        """The size of the segment that `take` would return."""

    def take(self, start: int, end: int) -> T_co:
        """The state of positions `start` to `end`. May take long."""


class PrefixMatch(Generic[T, S]):
    """The stored state of a prompt's first `length` positions, pinned until released, once.

    `segments` are consecutive, each with the number of its first positions that match.
    """

    def __init__(
        self, cache: PrefixCache[T, S], matched: list[tuple[Node[T, S], int]], snapshot: S | None
    ) -> None:
        self._cache = cache
        self._node = matched[-1][0] if matched else None
        self._is_released = False
        self.length = sum(count for _, count in matched)
        self.segments = tuple(
            (node.segment, count) for node, count in matched if node.segment is not None
        )
        self.snapshot = snapshot

    def release(self) -> None:
        """Raises RuntimeError if it was released before."""
        self._cache._release(self)

    def cut(self, length: int) -> None:
        """Shorten the match to its first `length` positions, without a snapshot."""
        segments, num_left = [], length
        for segment, count in self.segments:
            if num_left > 0:
                segments.append((segment, min(count, num_left)))
            num_left -= count
        self.segments, self.length, self.snapshot = tuple(segments), length, None


@dataclass(slots=True)
class _Gap(Generic[T, S]):
    """A step of an insertion: a segment to add to the tree."""

    node: Node[T, S]
    """The node to add the segment to, pinned until it is added."""
    has_room: bool
    """Whether there is room; if not, neither `make` nor `fill` is called."""
    make: Callable[[], tuple[T, ...]]
    """Computes the segment; called without the lock."""
    fill: Callable[[tuple[T, ...]], None]
    """Adds the segment to the tree; called with the lock."""


class PrefixCache(MemoryCache, Generic[T, S]):
    """A cache of KV by prompt, which evicts the least recently used ends of prompts. Thread-safe.

    With `needs_snapshots` a prompt can only be continued after a position with a snapshot, else
    anywhere outside a media span. Prompts of different `salt` share nothing. Segments are taken and
    split without the lock, since that may wait for a device.
    """

    def __init__(self, name: str, limit_bytes: int, *, needs_snapshots: bool = False) -> None:
        self.needs_snapshots = needs_snapshots
        self._tree = RadixTree[T, S](limit_bytes)
        super().__init__(name, self._tree)

    # ---- lookup ----------------------------------------------------------------------

    def match(
        self, prompt: PromptKey, limit: int, salt: str = "", min_length: int = 0
    ) -> PrefixMatch[T, S]:
        """The longest stored prefix of `prompt`, of at most `limit` positions.

        Empty if it has fewer than `min_length` positions.
        """
        with self._lock:
            match = self._match(prompt, limit, salt, min_length)
            self._hits += bool(match.length)
            self._misses += not match.length
            return match

    def empty_match(self) -> PrefixMatch[T, S]:
        """An empty match for `rematch`; neither a hit nor a miss."""
        with self._lock:
            self._num_references += 1
            return PrefixMatch(self, [], None)

    def rematch(
        self,
        match: PrefixMatch[T, S],
        prompt: PromptKey,
        limit: int,
        salt: str = "",
        min_length: int = 0,
    ) -> PrefixMatch[T, S]:
        """The longer of `match` and the longest match of `prompt` now; the other one is released.

        Neither a hit nor a miss.
        """
        with self._lock:
            new_match = self._match(prompt, limit, salt, min_length)
        longer, shorter = match, new_match
        if new_match.length > match.length:
            longer, shorter = new_match, match
        shorter.release()
        return longer

    def _match(
        self, prompt: PromptKey, limit: int, salt: str, min_length: int
    ) -> PrefixMatch[T, S]:
        path = self._tree.walk(prompt, limit, salt)
        if self.needs_snapshots:
            while path and not _has_snapshot(*path[-1]):
                path.pop()
        if sum(count for _, count in path) < min_length:
            path = []
        for node, _ in path[-1:]:
            self._tree.pin(node)
            self._tree.touch(node)
        self._num_references += 1
        snapshot = path[-1][0].snapshot if path and self.needs_snapshots else None
        return PrefixMatch(self, path, snapshot)

    def _release(self, match: PrefixMatch[T, S]) -> None:
        with self._lock:
            if match._is_released:
                raise RuntimeError("a prefix match was released twice")
            match._is_released = True
            self._num_references -= 1
            if match._node is not None:
                self._tree.unpin(match._node)
                self._keep_limit()
            match._node, match.segments, match.snapshot = None, (), None

    # ---- insertion -------------------------------------------------------------------

    def insert(
        self, prompt: PromptKey, source: Source[T, S], salt: str = "", *, merges_parts: bool = False
    ) -> None:
        """Store the missing state of `prompt` from `source`, as far as there is room.

        With `merges_parts`, for which `source` must have all of `prompt`, a growing conversation is
        stored in few parts: short parts at its end are replaced by one that includes the new part.
        Otherwise each turn would add two parts, each of which is copied separately when used.
        Raises the errors of `source`; parts stored before stay.
        """
        if not self.limit_bytes:
            return
        merges_parts = merges_parts and not self.needs_snapshots
        for end in self._ends(prompt, source):
            while gap := self._next_gap(prompt, end, source, salt, merges_parts=merges_parts):
                if not gap.has_room:
                    return
                self._fill(gap)

    def _ends(self, prompt: PromptKey, source: Source[T, S]) -> list[int]:
        if not self.needs_snapshots:
            return [len(prompt)]
        return sorted(position for position in source.snapshots if position)

    def _next_gap(
        self, prompt: PromptKey, end: int, source: Source[T, S], salt: str, *, merges_parts: bool
    ) -> _Gap[T, S] | None:
        """The next missing part of `prompt` up to `end`; None if nothing is missing.

        In that case the prompt is marked as recently used, and the snapshot after `end` stored.
        """
        snapshot = source.snapshots.get(end) if self.needs_snapshots else None
        with self._lock:
            node, start = self._tree.root(salt), 0
            for node, count in self._tree.walk(prompt, end, salt):
                start += count
                if count < len(node.edge) and (start < end or snapshot is not None):
                    return self._gap_inside(node, count)
            if start < end:
                merged = list[Node[T, S]]()
                if merges_parts:
                    node, start, merged = self._find_mergeable(node, start, end, source)
                part = prompt.part(start, end)
                return self._gap_after(node, part, start, source, snapshot, merged)
            self._set_snapshot(node, snapshot)
            self._tree.touch(node)
            return None

    def _set_snapshot(self, node: Node[T, S], snapshot: S | None) -> None:
        if snapshot is None or node.snapshot is not None:
            return
        if self._tree.make_room(node, snapshot.size_bytes):
            self._tree.set_snapshot(node, snapshot)

    def _gap_inside(self, node: Node[T, S], at: int) -> _Gap[T, S]:
        """The split of an edge of which only the first `at` positions match."""
        edge, segment = node.edge, node.segment
        assert segment is not None

        def split(halves: tuple[T, ...]) -> None:
            if node.edge is edge:
                first, rest = halves
                self._tree.split(node, at, (first, rest))

        return self._pin_gap(_Gap(node, True, lambda: segment.split(at), split))

    def _gap_after(
        self,
        node: Node[T, S],
        edge: PromptKey,
        start: int,
        source: Source[T, S],
        snapshot: S | None,
        merged: list[Node[T, S]],
    ) -> _Gap[T, S]:
        """A missing part of the prompt after `node`, from position `start` on.

        merged: nodes after `node`, the last one first, whose parts the new node takes over.
        """
        end = start + len(edge)
        size_bytes = source.size_bytes(start, end)
        size_bytes += 0 if snapshot is None else snapshot.size_bytes
        more_bytes = size_bytes - sum(merged_node.size_bytes for merged_node in merged)
        last_node = merged[0] if merged else node

        def is_open() -> bool:
            """Whether `edge` can be added, since no child begins with the same key."""
            if merged:
                return merged[-1].parent is node and _can_merge(merged, len(edge))
            return edge.first not in node.children

        def append(segments: tuple[T, ...]) -> None:
            is_here = self._tree.contains(node) and is_open()
            if is_here and self._tree.make_room(last_node, more_bytes):
                for merged_node in merged:
                    self._tree.remove_with_leaves(merged_node)
                self._tree.append(node, edge, segments[0], snapshot)

        has_room = is_open() and self._tree.make_room(last_node, more_bytes)
        return self._pin_gap(_Gap(node, has_room, lambda: (source.take(start, end),), append))

    def _find_mergeable(
        self, node: Node[T, S], start: int, end: int, source: Source[T, S]
    ) -> tuple[Node[T, S], int, list[Node[T, S]]]:
        """(node, position after it, nodes to merge): where to store a prompt up to `end`.

        The missing part begins after `node`, at `start`. The nodes to merge, the last one
        first, are stored again with it. Each is at most twice as long as the rest of the prompt
        after it, so that parts get longer towards the beginning, and nothing is copied often.
        """
        mergeable = list[Node[T, S]]()
        while node.parent is not None and len(node.edge) <= 2 * (end - start):
            part_start = start - len(node.edge)
            is_small = source.size_bytes(part_start, end) <= _MAX_MERGED_BYTES
            if not is_small or not _can_merge([*mergeable, node], end - part_start):
                break
            mergeable.append(node)
            node, start = node.parent, part_start
        return node, start, mergeable

    def _pin_gap(self, gap: _Gap[T, S]) -> _Gap[T, S]:
        if gap.has_room:
            self._tree.pin(gap.node)
            self._num_references += 1
        return gap

    def _fill(self, gap: _Gap[T, S]) -> None:
        """Add the segment of `gap`, unless another thread has changed the tree there."""
        segments: tuple[T, ...] | None = None
        try:
            segments = gap.make()
        finally:
            with self._lock:
                self._tree.unpin(gap.node)
                self._num_references -= 1
                if segments is not None:
                    gap.fill(segments)
                self._keep_limit()


def _can_merge(nodes: list[Node[T, S]], num_positions: int) -> bool:
    """Whether `nodes`, the last one first, may be merged into a part of `num_positions`.

    Not if one is pinned or has left the tree, nor if they have other children than each other and
    short leaves. These are answers that the conversation did not continue, which merging drops.
    """
    below: Node[T, S] | None = None
    for node in nodes:
        if len(node.children) > _DROPPED_SHARE * num_positions + 1:
            return False  # a shared beginning may have thousands of children: too many to check
        is_there = node.parent is not None and node.parent.children.get(node.edge.first) is node
        siblings = [child for child in node.children.values() if child is not below]
        if node.pins or not is_there or len(siblings) + (below is not None) != len(node.children):
            return False
        if any(child.children or child.pins for child in siblings):
            return False
        if _DROPPED_SHARE * num_positions < sum(len(child.edge) for child in siblings):
            return False
        below = node
    return True


def _has_snapshot(node: Node[T, S], count: int) -> bool:
    """Whether `node` has a snapshot after the first `count` of its positions."""
    return node.snapshot is not None and count == len(node.edge)
