"""Whether the counters of a cache and what it holds agree."""

from __future__ import annotations

import stat
from functools import singledispatch

from vlm_server.cache.caches import Caches
from vlm_server.cache.disk.store import DiskStore
from vlm_server.cache.lru import LruCache
from vlm_server.cache.prefix import PrefixCache
from vlm_server.cache.radix_tree import RadixTree


@singledispatch
def check_integrity(cache: object) -> None:
    """Raises AssertionError if sums, entries, references and limit of a cache disagree."""
    raise TypeError(type(cache).__name__)


@check_integrity.register
def _(caches: Caches) -> None:
    for cache in caches._all:
        check_integrity(cache)


@check_integrity.register
def _(cache: LruCache) -> None:
    with cache._lock:
        bounded, entries = cache._entries, cache._entries.order.values()
        assert bounded.size_bytes == sum(entry.size_bytes for entry in entries)
        assert bounded.pinned_bytes == sum(entry.size_bytes for entry in entries if entry.pins)
        assert all(entry.pins >= 0 for entry in entries)
        assert sum(entry.pins for entry in entries) <= cache._num_references
        assert bounded.size_bytes <= max(bounded.limit_bytes, bounded.pinned_bytes)


@check_integrity.register
def _(cache: PrefixCache) -> None:
    with cache._lock:
        assert _num_pins(cache._tree) <= cache._num_references


def _num_pins(tree: RadixTree) -> int:
    """Raises AssertionError if tree, order of use and sums disagree."""
    in_tree, num_pins = set(), 0
    remaining = list(tree._roots.values())
    while remaining:
        node = remaining.pop()
        own_pins = node.pins - sum(child.pins for child in node.children.values())
        assert node.parent is None or own_pins >= 0
        num_pins += own_pins if node.parent is not None else 0
        for first, child in node.children.items():
            assert child.parent is node
            assert len(child.edge)
            assert child.edge.first == first
        in_tree.update(node.children.values())
        remaining += node.children.values()
    assert in_tree == set(tree.order)
    order = {node: number for number, node in enumerate(tree.order)}
    assert all(order[n] < order[n.parent] for n in order if n.parent in order)
    assert tree.size_bytes == sum(node.size_bytes for node in order)
    assert tree.pinned_bytes == sum(node.size_bytes for node in order if node.pins)
    assert tree.size_bytes <= max(tree.limit_bytes, tree.pinned_bytes)
    return num_pins


@check_integrity.register
def _(store: DiskStore) -> None:
    with store._folder.turn():
        files = store._folder.files
        entries = {file: store._folder.path(file).stat() for file in files}
        num_bytes = sum(file.size_bytes for file in files)
        assert all(entry.st_size == file.size_bytes for file, entry in entries.items())
        assert all(stat.S_IMODE(entry.st_mode) == 0o600 for entry in entries.values())
        assert store._folder.counts[:2] == (len(files), num_bytes)
        assert num_bytes <= store._limit_bytes
        own_paths = {store._folder.path(file) for file in files if file.owner == store._owner}
        found = set(store._own_folder.iterdir())
        assert set(store.paths.values()) == own_paths == own_paths & found
