"""A radix tree of prompts and their computed state. Not thread-safe.

Each node stands for a part of a prompt after its parent's part, and holds the state of that part.
Prompts are compared, not hashed, so that no other prompt's state can match. No edge ends inside a
media span.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar

from vlm_server.cache.lru import BoundedEntries
from vlm_server.cache.prompt_key import NOTHING, PromptKey


class Segment(Protocol):
    """The state of consecutive positions of a prompt, such as their KV."""

    @property
    def size_bytes(self) -> int: ...

    def split(self, at: int) -> tuple[Self, Self]:
        """The segments of the first `at` positions and of the rest."""


class Snapshot(Protocol):
    """The state after a position of a prompt, of layers whose state can't be cut."""

    @property
    def size_bytes(self) -> int: ...


T = TypeVar("T", bound=Segment)
S = TypeVar("S", bound=Snapshot)


@dataclass(eq=False, slots=True)
class Node(Generic[T, S]):
    """A part of a prompt, `edge`, after its parent's part."""

    edge: PromptKey
    segment: T | None
    parent: Node[T, S] | None
    """None for a root."""
    snapshot: S | None = None
    children: dict[int | str, Node[T, S]] = field(default_factory=dict)
    pins: int = 0
    """The number of pins of this node and all nodes below it; of a root, of itself alone."""

    @property
    def size_bytes(self) -> int:
        own = 0 if self.segment is None else self.segment.size_bytes
        return own + (0 if self.snapshot is None else self.snapshot.size_bytes)

    @property
    def path(self) -> Iterator[Node[T, S]]:
        """This node and its ancestors, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class RadixTree(BoundedEntries[Node[T, S], Node[T, S]], Generic[T, S]):
    """A tree bounded in bytes, with a root for each salt. Evicts least recently used leaves first.

    A use of a node is also one of its ancestors: in `order`, these come after the node.
    """

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self._roots: dict[str, Node[T, S]] = {}

    def contains(self, node: Node[T, S]) -> bool:
        """Whether `node`, which may be a root, is still in the tree."""
        return node in self.order or any(node is root for root in self._roots.values())

    # ---- lookup ----------------------------------------------------------------------

    def root(self, salt: str) -> Node[T, S]:
        """The root of prompts with `salt`; if missing, it is made, and unused roots are dropped."""
        if salt not in self._roots:
            self._roots = {
                key: root for key, root in self._roots.items() if root.children or root.pins
            }
            self._roots[salt] = Node(NOTHING, None, None)
        return self._roots[salt]

    def walk(self, prompt: PromptKey, limit: int, salt: str) -> list[tuple[Node[T, S], int]]:
        """The nodes that `prompt` begins with, each with the number of its positions that match.

        Matches at most `limit` positions, and never a part of a media span.
        """
        matched, at = list[tuple[Node[T, S], int]](), 0
        limit = min(limit, len(prompt))
        node = self._roots.get(salt)
        while node is not None and at < limit:
            child = node.children.get(prompt.key_at(at))
            if child is None:
                break
            count = prompt.num_common(at, child.edge)
            count = prompt.floor(min(at + count, limit)) - at
            if not count:
                break
            matched.append((child, count))
            at += count
            node = child if count == len(child.edge) else None
        return matched

    def touch(self, node: Node[T, S]) -> None:
        """Make `node` the most recently used."""
        for path_node in node.path:
            self.order.move_to_end(path_node)

    def pin(self, node: Node[T, S]) -> None:
        """Keep `node` and its ancestors from eviction until `unpin`; keep a root in the tree."""
        if node.parent is None:
            node.pins += 1
        for pinned in node.path:
            self.pinned_bytes += 0 if pinned.pins else pinned.size_bytes
            pinned.pins += 1

    def unpin(self, node: Node[T, S]) -> None:
        if node.parent is None:
            node.pins -= 1
        for unpinned in node.path:
            unpinned.pins -= 1
            self.pinned_bytes -= 0 if unpinned.pins else unpinned.size_bytes

    # ---- growth ----------------------------------------------------------------------

    def append(
        self, parent: Node[T, S], edge: PromptKey, segment: T, snapshot: S | None
    ) -> Node[T, S]:
        """Add a child to `parent`, which must have no child with the same first key."""
        node = Node(edge, segment, parent, snapshot)
        parent.children[edge.first] = node
        self.order[node] = node
        self.touch(node)
        self._grew(node, node.size_bytes)
        return node

    def set_snapshot(self, node: Node[T, S], snapshot: S) -> None:
        """Store the state after `node`, which must have none."""
        node.snapshot = snapshot
        self._grew(node, snapshot.size_bytes)

    def split(self, node: Node[T, S], at: int, halves: tuple[T, T]) -> Node[T, S]:
        """Add a node above `node` for its first `at` positions; `halves`: of `node.segment`."""
        assert node.parent is not None
        size_bytes = node.size_bytes
        upper = Node[T, S](node.edge.part(0, at), halves[0], node.parent, pins=node.pins)
        node.parent.children[upper.edge.first] = upper
        node.edge, node.segment, node.parent = node.edge.part(at, len(node.edge)), halves[1], upper
        upper.children[node.edge.first] = node
        self.order[upper] = upper
        self.touch(upper)
        self._grew(node, upper.size_bytes + node.size_bytes - size_bytes)
        return upper

    def _grew(self, node: Node[T, S], size_bytes: int) -> None:
        self.size_bytes += size_bytes
        self.pinned_bytes += size_bytes if node.pins else 0

    # ---- eviction --------------------------------------------------------------------

    def make_room(self, after: Node[T, S], size_bytes: int) -> bool:
        """Evict until `size_bytes` more fit, but not `after` or its ancestors.

        Returns whether there is room. Evicts nothing if there can't be.
        """
        self.pin(after)
        if has_room := self.pinned_bytes + size_bytes <= self.limit_bytes:
            self.evict(self.size_bytes + size_bytes - self.limit_bytes)
        self.unpin(after)
        return has_room

    def remove_with_leaves(self, node: Node[T, S]) -> None:
        """Remove an unpinned node whose children are all unpinned leaves, which are evicted."""
        leaves = list(node.children.values())
        for leaf in leaves:
            self.remove(leaf)
        self.num_evictions += len(leaves)
        self.remove(node)

    def remove(self, key: Node[T, S]) -> None:
        """Remove an unpinned leaf."""
        assert not key.children
        assert not key.pins
        assert key.parent is not None
        del key.parent.children[key.edge.first]
        super().remove(key)
