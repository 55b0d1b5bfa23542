"""What was computed of prompts, found again by their beginnings. Knows elements; knows no tensor.

A radix tree: each node stands for a segment of elements after its parent's, and holds what was
computed of them. PromptKey are compared, not hashed, so that no other prompt's state can be
found. No edge ends inside a span.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar

from vlm_server.cache.prompt_key import NOTHING, PromptKey
from vlm_server.protocol import CacheStats


class Segment(Protocol):
    """What was computed of a segment of elements."""

    @property
    def size_bytes(self) -> int: ...

    def split(self, at: int) -> tuple[Self, Self]:
        """The first `at` elements', and the rest's."""
        ...


class Snapshot(Protocol):
    """A state that can't be cut: that of all elements up to one place."""

    @property
    def size_bytes(self) -> int: ...


T = TypeVar("T", bound=Segment)
S = TypeVar("S", bound=Snapshot)
T_co = TypeVar("T_co", bound=Segment, covariant=True)
S_co = TypeVar("S_co", bound=Snapshot, covariant=True)


class Source(Protocol[T_co, S_co]):
    """A prompt that was just computed."""

    @property
    def snapshots(self) -> Mapping[int, S_co]:
        """States by the number of elements that they follow."""
        ...

    def size_bytes(self, start: int, end: int) -> int:
        """Size of what `take` would give."""
        ...

    def take(self, start: int, end: int) -> T_co: ...


@dataclass(eq=False, slots=True)
class _Node(Generic[T, S]):
    edge: PromptKey
    segment: T | None
    parent: _Node[T, S] | None
    snapshot: S | None = None
    children: dict[int | str, _Node[T, S]] = field(default_factory=dict)
    pins: int = 0

    @property
    def size_bytes(self) -> int:
        own = 0 if self.segment is None else self.segment.size_bytes
        return own + (0 if self.snapshot is None else self.snapshot.size_bytes)

    @property
    def path(self) -> Iterator[_Node[T, S]]:
        """This node and those above it, but for the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class PrefixMatch(Generic[T, S]):
    """What the tree has of a prompt's first `length` elements; pinned until released.

    `segments` follow each other, each with how many of its first elements are meant.
    Releasing twice is no error.
    """

    def __init__(
        self, cache: PrefixCache[T, S], found: list[tuple[_Node[T, S], int]], snapshot: S | None
    ) -> None:
        self._cache = cache
        self._node = found[-1][0] if found else None
        self.length = sum(count for _, count in found)
        self.segments = tuple(
            (node.segment, count) for node, count in found if node.segment is not None
        )
        self.snapshot = snapshot

    def release(self) -> None:
        node, self._node = self._node, None
        self.segments, self.snapshot = (), None
        if node is not None:
            self._cache._release(node)


class PrefixCache(Generic[T, S]):
    """Bounded in bytes; evicts what was used longest ago, the ends first. Thread-safe.

    With `needs_snapshots` a prompt can go on only where a snapshot was taken, else anywhere
    outside a span. A `salt` keeps prompts apart that shall share nothing.
    """

    def __init__(self, name: str, limit_bytes: int, *, needs_snapshots: bool = False) -> None:
        self._name = name
        self.limit_bytes = limit_bytes
        self.needs_snapshots = needs_snapshots
        self._lock = threading.Lock()
        self._roots: dict[str, _Node[T, S]] = {}
        self._nodes: OrderedDict[_Node[T, S], None] = OrderedDict()
        """The one used longest ago comes first. Who uses a node uses those above it after it, so
        that none comes before one below it."""
        self._size_bytes = self._pinned_bytes = 0
        self._hits = self._misses = self._evictions = 0

    def match(
        self, elements: PromptKey, limit: int, salt: str = "", least: int = 0
    ) -> PrefixMatch[T, S]:
        """The longest known beginning of `elements`, of `limit` of them at most.

        One of fewer than `least` is of no use: then there is none.
        """
        with self._lock:
            match = self._find(elements, limit, salt, least)
            self._hits += bool(match.length)
            self._misses += not match.length
            return match

    def improve(
        self,
        match: PrefixMatch[T, S],
        elements: PromptKey,
        limit: int,
        salt: str = "",
        least: int = 0,
    ) -> PrefixMatch[T, S]:
        """`match`, or a longer one in its place, of the same prompt. Counts as no other use."""
        with self._lock:
            better = self._find(elements, limit, salt, least)
        worse = match if better.length > match.length else better
        worse.release()
        return match if worse is better else better

    def insert(self, elements: PromptKey, source: Source[T, S], salt: str = "") -> None:
        """Keep what `source` has of `elements`, as far as it is not here and finds room."""
        if not self.limit_bytes:
            return
        with self._lock:
            node, start = self._root(salt), 0
            for end in self._ends(elements, source):
                grown = self._grow(node, elements, start, end, source)
                if grown is None:
                    return
                node, start = grown, end
                self._touch(node)

    @property
    def evictable_bytes(self) -> int:
        with self._lock:
            return self._size_bytes - self._pinned_bytes

    def evict(self, num_bytes: int) -> int:
        """Drop so much, if that is not pinned; returns what went."""
        with self._lock:
            before = self._size_bytes
            for node in [node for node in self._nodes if not node.pins]:
                if before - self._size_bytes >= num_bytes:
                    break
                self._evict(node)
            return before - self._size_bytes

    def clear(self) -> None:
        """Drop what is not pinned, and count from zero."""
        with self._lock:
            for node in [node for node in self._nodes if not node.pins]:
                self._evict(node)
            self._hits = self._misses = self._evictions = 0

    def read(self) -> CacheStats:
        with self._lock:
            return CacheStats(
                name=self._name,
                entries=len(self._nodes),
                size_bytes=self._size_bytes,
                pinned_bytes=self._pinned_bytes,
                limit_bytes=self.limit_bytes,
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
            )

    def check_integrity(self) -> None:
        """Raises AssertionError if the tree, the order of use and the sums are not one."""
        with self._lock:
            in_tree = set[_Node[T, S]]()
            waiting = list(self._roots.values())
            while waiting:
                node = waiting.pop()
                for first, child in node.children.items():
                    assert child.parent is node
                    assert len(child.edge)
                    assert child.edge.first == first
                    assert child.pins >= sum(below.pins for below in child.children.values())
                in_tree.update(node.children.values())
                waiting += node.children.values()
            assert in_tree == set(self._nodes)
            order = {node: number for number, node in enumerate(self._nodes)}
            assert all(order[n] < order[n.parent] for n in order if n.parent in order)
            assert self._size_bytes == sum(node.size_bytes for node in order)
            assert self._pinned_bytes == sum(node.size_bytes for node in order if node.pins)
            assert self._size_bytes <= self.limit_bytes

    # ---- finding -------------------------------------------------------------------

    def _find(self, elements: PromptKey, limit: int, salt: str, least: int) -> PrefixMatch[T, S]:
        found, at = list[tuple[_Node[T, S], int]](), 0
        limit = min(limit, len(elements))
        node = self._roots.get(salt)
        while node is not None and at < limit:
            child = node.children.get(elements.key_at(at))
            if child is None:
                break
            count = elements.num_common(at, child.edge)
            count = elements.floor(min(at + count, limit)) - at
            if not count:
                break
            found.append((child, count))
            at += count
            node = child if count == len(child.edge) else None
        if self.needs_snapshots:
            while found and not self._has_snapshot(*found[-1]):
                found.pop()
        if sum(count for _, count in found) < least:
            found = []
        for last, _ in found[-1:]:
            self._pin(last)
            self._touch(last)
        snapshot = found[-1][0].snapshot if found and self.needs_snapshots else None
        return PrefixMatch(self, found, snapshot)

    @staticmethod
    def _has_snapshot(node: _Node[T, S], count: int) -> bool:
        """Whether `node` has the state after the first `count` of its elements."""
        return node.snapshot is not None and count == len(node.edge)

    # ---- growing -------------------------------------------------------------------

    def _root(self, salt: str) -> _Node[T, S]:
        """Where prompts of `salt` begin. Salts of which nothing is left are forgotten."""
        if salt not in self._roots:
            self._roots = {known: root for known, root in self._roots.items() if root.children}
            self._roots[salt] = _Node(NOTHING, None, None)
        return self._roots[salt]

    def _ends(self, elements: PromptKey, source: Source[T, S]) -> list[int]:
        """Where nodes shall end."""
        if not self.needs_snapshots:
            return [len(elements)]
        return sorted(place for place in source.snapshots if place)

    def _grow(
        self, node: _Node[T, S], elements: PromptKey, start: int, end: int, source: Source[T, S]
    ) -> _Node[T, S] | None:
        """The node at `end`, where `node` is at `start`; None if there is no room for it."""
        snapshot = source.snapshots.get(end) if self.needs_snapshots else None
        while start < end:
            child = node.children.get(elements.key_at(start))
            if child is None:
                return self._add(node, elements, start, end, source)
            count = min(elements.num_common(start, child.edge), end - start)
            if not count:  # one key names two lengths: what is here stays
                return None
            if count < len(child.edge):
                if start + count == end and snapshot is None:
                    return child
                child = self._cut(child, count)
            node, start = child, start + count
        if (
            snapshot is not None
            and node.snapshot is None
            and self._make_room(node, snapshot.size_bytes)
        ):
            node.snapshot = snapshot
            self._grew(node, snapshot.size_bytes)
        return node

    def _add(
        self, node: _Node[T, S], elements: PromptKey, start: int, end: int, source: Source[T, S]
    ) -> _Node[T, S] | None:
        snapshot = source.snapshots.get(end) if self.needs_snapshots else None
        size_bytes = source.size_bytes(start, end) + (
            0 if snapshot is None else snapshot.size_bytes
        )
        if not self._make_room(node, size_bytes):
            return None
        edge = elements.part(start, end)
        new = _Node[T, S](edge, source.take(start, end), node, snapshot)
        node.children[edge.first] = new
        self._nodes[new] = None
        self._grew(new, new.size_bytes)
        return new

    def _cut(self, node: _Node[T, S], at: int) -> _Node[T, S]:
        """Put a new node above `node`, which takes over the first `at` of its elements."""
        assert node.segment is not None
        assert node.parent is not None
        size_bytes = node.size_bytes
        first, rest = node.segment.split(at)
        upper = _Node[T, S](node.edge.part(0, at), first, node.parent, pins=node.pins)
        node.parent.children[upper.edge.first] = upper
        node.edge, node.segment, node.parent = node.edge.part(at, len(node.edge)), rest, upper
        upper.children[node.edge.first] = node
        self._nodes[upper] = None
        self._touch(upper)
        self._grew(node, upper.size_bytes + node.size_bytes - size_bytes)
        return upper

    def _make_room(self, keep: _Node[T, S], size_bytes: int) -> bool:
        """Evict until `size_bytes` more fit; `keep` and those above it stay."""
        self._pin(keep)
        if has_room := self._pinned_bytes + size_bytes <= self.limit_bytes:
            for node in [node for node in self._nodes if not node.pins]:
                if self._size_bytes + size_bytes <= self.limit_bytes:
                    break
                self._evict(node)
        self._unpin(keep)
        return has_room

    def _evict(self, node: _Node[T, S]) -> None:
        assert not node.children
        assert node.parent is not None
        del node.parent.children[node.edge.first]
        del self._nodes[node]
        self._size_bytes -= node.size_bytes
        self._evictions += 1

    # ---- counting ------------------------------------------------------------------

    def _grew(self, node: _Node[T, S], size_bytes: int) -> None:
        self._size_bytes += size_bytes
        self._pinned_bytes += size_bytes if node.pins else 0

    def _touch(self, node: _Node[T, S]) -> None:
        for each in node.path:
            self._nodes.move_to_end(each)

    def _pin(self, node: _Node[T, S]) -> None:
        for each in node.path:
            self._pinned_bytes += 0 if each.pins else each.size_bytes
            each.pins += 1

    def _unpin(self, node: _Node[T, S]) -> None:
        for each in node.path:
            each.pins -= 1
            self._pinned_bytes -= 0 if each.pins else each.size_bytes

    def _release(self, node: _Node[T, S]) -> None:
        with self._lock:
            self._unpin(node)
