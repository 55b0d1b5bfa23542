"""All caches as one, with a tier on disk that is not used before serving begins."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.unit.cache.conformance import Hold
from tests.unit.cache.fakes import FakeSource
from tests.unit.cache.prompts import prompt_of
from vlm_server.cache.cache import Cache
from vlm_server.cache.caches import Caches, EncodedImage
from vlm_server.cache.lru import LruCache
from vlm_server.cache.prefix import Source
from vlm_server.cache.prompt_key import PromptKey
from vlm_server.protocol import CacheStats

NAMES = ["token_layout", "pixel", "encoder", "prefix"]


@dataclass
class FakeFeatures:
    size_bytes: int = 1


class LoadedSource(FakeSource):
    """What a disk had of all of its prompt."""

    @property
    def length(self) -> int:
        return len(self.prompt_key)


@dataclass
class FakeDisk:
    """Has `features` and `source`; says what it was asked."""

    features: dict[str, EncodedImage] = field(default_factory=dict)
    source: LoadedSource | None = None
    caches: tuple[Cache, ...] = ()
    calls: list[str] = field(default_factory=list)

    def store_features(self, key: str, features: EncodedImage) -> None:
        self.calls.append(f"store {key}")

    def load_features(self, key: str) -> EncodedImage | None:
        self.calls.append(f"load {key}")
        return self.features.get(key)

    def store_prefix(self, prompt: PromptKey, source: Source[Any, Any], salt: str) -> None:
        self.calls.append(f"store {len(prompt)}")

    def load_prefix(
        self, prompt: PromptKey, known: int, limit: int, salt: str, least: int
    ) -> LoadedSource | None:
        self.calls.append(f"load {known} to {limit}")
        return self.source

    def close(self, seconds: float) -> None:
        self.calls.append("close")


@dataclass
class WrongCache:
    """Counts what it does not store."""

    def read(self) -> CacheStats:
        return CacheStats("wrong", 1, 1, 0, 1, 0, 0, 0)

    def check_integrity(self) -> None:
        raise AssertionError("stores nothing")


def caches_on(disk: FakeDisk) -> Caches:
    return Caches.of(pixel_bytes=10, encoder_bytes=10, prefix_bytes=20, disk=disk)


def use(caches: Caches) -> None:
    """Ask for features and a prefix, and store them."""
    assert caches.lease_features("a") is None
    caches.store_features("a", FakeFeatures()).release()
    prompt = prompt_of([1, 2, 3])
    caches.match_prefix(prompt, 2, "").release()
    caches.store_prefix(prompt, FakeSource(prompt), "")


def test_caches_are_read_by_name_and_the_disk_comes_last() -> None:
    disk = LruCache[bytes]("disk", 30)
    caches = caches_on(FakeDisk(caches=(disk,)))
    caches.pixels.put("a", b"1234", 4).release()
    readings = caches.read()
    assert [reading.name for reading in readings] == [*NAMES, "disk"]
    assert [reading.size_bytes for reading in readings] == [0, 4, 0, 0, 0]
    assert [reading.limit_bytes for reading in readings] == [0, 10, 10, 20, 30]
    caches.check_integrity()
    assert [reading.name for reading in Caches.of().read()] == NAMES


def test_one_wrong_cache_is_told() -> None:
    caches = caches_on(FakeDisk(caches=(WrongCache(),)))
    with pytest.raises(AssertionError, match="stores nothing"):
        caches.check_integrity()


def test_a_warm_up_neither_writes_nor_reads_the_disk_and_leaves_nothing() -> None:
    disk = FakeDisk()
    caches = caches_on(disk)
    use(caches)
    assert disk.calls == []
    assert sum(reading.entries for reading in caches.read()) == 2
    caches.begin_serving()
    assert not any(r.entries or r.hits or r.misses or r.evictions for r in caches.read())
    use(caches)
    assert disk.calls == ["load a", "store a", "load 0 to 2", "store 3"]


def test_a_closed_disk_is_not_used() -> None:
    disk = FakeDisk()
    caches = caches_on(disk)
    caches.begin_serving()
    caches.close(1.0)
    use(caches)
    assert disk.calls == ["close"]


def test_what_the_disk_has_is_stored_in_memory() -> None:
    prompt = prompt_of([1, 2, 3])
    disk = FakeDisk({"a": FakeFeatures()}, LoadedSource(prompt))
    caches = caches_on(disk)
    caches.begin_serving()
    lease, match = caches.lease_features("a"), caches.match_prefix(prompt_of([1, 2, 3, 4]), 4, "")
    assert lease is not None
    assert (lease.value, match.length) == (disk.features["a"], 3)
    assert (caches.features.read().entries, caches.prefixes.read().entries) == (1, 1)
    assert caches.num_holds == 2
    lease.release()
    match.release()
    assert caches.num_holds == 0


def test_a_disk_hit_that_can_not_be_copied_is_a_miss() -> None:
    prompt = prompt_of([1, 2, 3])
    caches = caches_on(FakeDisk(source=LoadedSource(prompt, failing=0)))
    caches.begin_serving()
    caches.prefixes.insert(prompt_of([1]), FakeSource(prompt_of([1])))
    match = caches.match_prefix(prompt, 3, "")
    assert match.length == 1
    match.release()
    assert caches.num_holds == caches.prefixes.read().pinned_bytes == 0


def test_prefixes_are_evicted_before_features() -> None:
    caches = caches_on(FakeDisk())
    use(caches)
    assert caches.evictable_bytes == 4
    assert caches.evict(2) == 3
    assert [r.entries for r in caches.read()] == [0, 0, 1, 0]
    assert caches.evict(2) == 1
    assert caches.evictable_bytes == 0


def test_holds_of_all_caches_are_counted() -> None:
    caches = caches_on(FakeDisk())
    prompt = prompt_of([1])
    held: list[Hold] = [
        caches.token_layouts.put("a", 0, 1),
        caches.pixels.put("a", 0, 1),
        caches.store_features("a", FakeFeatures()),
        caches.match_prefix(prompt, 1, ""),
    ]
    for number, each in enumerate(held):
        assert caches.num_holds == 4 - number
        each.release()
    assert caches.num_holds == 0
