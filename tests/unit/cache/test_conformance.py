"""Every cache of an engine does what a cache must do: see `conformance`."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest

from tests.support.integrity import check_integrity
from tests.unit.cache.conformance import ENTRY_BYTES, LIMIT_BYTES, EveryCache, Hold, HoldingCache
from tests.unit.cache.disk_entries import key_of, write
from tests.unit.cache.fakes import SNAPSHOT_BYTES, FakeSource
from tests.unit.cache.prompts import prompt_of
from vlm_server.cache.caches import Caches
from vlm_server.cache.disk.store import DiskStore
from vlm_server.cache.lru import LruCache
from vlm_server.cache.prefix import PrefixCache, PrefixMatch
from vlm_server.cache.prompt_key import PromptKey
from vlm_server.protocol import CacheStats

MemoryCache = TypeVar("MemoryCache", LruCache[int], PrefixCache[Any, Any])


class MemoryAdapter(Generic[MemoryCache]):
    def __init__(self, cache: MemoryCache) -> None:
        self._cache = cache
        self.stats, self.check_integrity = cache.stats, partial(check_integrity, cache)
        self.evict, self.clear = cache.evict, cache.clear

    @property
    def num_references(self) -> int:
        return self._cache.num_references

    @property
    def evictable_bytes(self) -> int:
        return self._cache.evictable_bytes


class LruAdapter(MemoryAdapter[LruCache[int]]):
    def put(self, number: int, size_bytes: int = ENTRY_BYTES) -> None:
        self._cache.put(str(number), number, size_bytes).release()

    def get(self, number: int) -> bool:
        value = self._cache.get(str(number))
        assert value in (None, number)
        return value is not None

    @property
    def stored(self) -> set[int]:
        return {number for number in range(10) if str(number) in self._cache}

    def hold(self, number: int) -> Hold:
        lease = self._cache.lease(str(number))
        return lease or self._cache.put(str(number), number, LIMIT_BYTES + 1)


class TestLruCaches(HoldingCache):
    @pytest.fixture(params=["token_layouts", "pixels", "features", "tiles"])
    def cache(self, request: pytest.FixtureRequest) -> LruAdapter:
        caches = Caches(
            token_layout_bytes=LIMIT_BYTES,
            pixel_bytes=LIMIT_BYTES,
            encoder_bytes=LIMIT_BYTES,
            tile_bytes=LIMIT_BYTES,
        )
        return LruAdapter(getattr(caches, request.param))


class PrefixAdapter(MemoryAdapter[PrefixCache[Any, Any]]):
    """Entries are prompts that have nothing in common."""

    def put(self, number: int, size_bytes: int = ENTRY_BYTES) -> None:
        prompt = self._prompt(number, size_bytes)
        self._cache.insert(prompt, FakeSource(prompt, frozenset([len(prompt)])))

    def get(self, number: int) -> bool:
        match = self._match(number)
        match.release()
        return match.length > 0

    @property
    def stored(self) -> set[int]:
        prompts = {number: self._prompt(number, LIMIT_BYTES) for number in range(10)}
        walk = self._cache._tree.walk
        return {number for number, prompt in prompts.items() if walk(prompt, LIMIT_BYTES, "")}

    def hold(self, number: int) -> Hold:
        return self._match(number)

    def _match(self, number: int) -> PrefixMatch[Any, Any]:
        return self._cache.match(self._prompt(number, LIMIT_BYTES + 1), LIMIT_BYTES)

    def _prompt(self, number: int, size_bytes: int) -> PromptKey:
        num_tokens = size_bytes - SNAPSHOT_BYTES * self._cache.needs_snapshots
        return prompt_of([100 * number + each for each in range(num_tokens)])


class TestPrefixCache(HoldingCache):
    @pytest.fixture(params=[False, True], ids=["plain", "with snapshots"])
    def cache(self, request: pytest.FixtureRequest) -> PrefixAdapter:
        caches = Caches(prefix_bytes=LIMIT_BYTES, needs_snapshots=request.param)
        return PrefixAdapter(caches.prefixes)


class DiskAdapter:
    """One thread at a time makes room and writes."""

    def __init__(self, store: DiskStore) -> None:
        self._store = store
        self._is_writing = threading.Lock()
        self.check_integrity = partial(check_integrity, store)

    def stats(self) -> CacheStats:
        return self._store.stats()

    def put(self, number: int, size_bytes: int = ENTRY_BYTES) -> None:
        content = str(number).encode() * size_bytes
        with self._is_writing:
            key = key_of(number)
            if key in self._store or self._store.make_room(size_bytes) is not None:
                self._store.put(key, lambda path: write(path, content[:size_bytes]))

    def get(self, number: int) -> bool:
        content = self._store.get(key_of(number))
        self._store.touch([key_of(number)])
        return content is not None

    @property
    def stored(self) -> set[int]:
        return {number for number in range(10) if key_of(number) in self._store}

    def evict(self, num_bytes: int) -> int:
        with self._is_writing:
            before = self._store.stats().size_bytes
            self._store.make_room(LIMIT_BYTES - before + min(num_bytes, before))
            return before - self._store.stats().size_bytes


class TestDiskStore(EveryCache):
    @pytest.fixture
    def cache(self, tmp_path: Path) -> DiskAdapter:
        return DiskAdapter(DiskStore("disk", tmp_path, "a" * 64, LIMIT_BYTES))
