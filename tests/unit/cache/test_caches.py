"""All caches as one, with a tier on disk that is not used before serving begins."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.support.integrity import check_integrity
from tests.unit.cache.conformance import Hold
from tests.unit.cache.fakes import FakeDisk, FakeSource, LoadedSource
from tests.unit.cache.prompts import Item, prompt_of
from vlm_server.cache.caches import Caches, DeviceSizes, EncodedImage
from vlm_server.cache.disk.tier import DiskRead
from vlm_server.cache.lru import LruCache
from vlm_server.cache.prompt_key import PromptKey
from vlm_server.cache.references import CacheReferences
from vlm_server.errors import OutOfMemory

PROMPT: list[Item] = [1, 2, ("a", 2, 9)]
NAMES = ["token_layout", "pixel", "encoder", "tile", "prefix", "vector"]


@dataclass
class FakeFeatures:
    size_bytes: int = 1
    tokens_per_call: int | None = None


def caches_on(disk: FakeDisk) -> Caches:
    return Caches(pixel_bytes=10, encoder_bytes=10, prefix_bytes=20, open_disk=lambda: disk)


def use(caches: Caches) -> None:
    """Ask for a prompt with an image, and store what was computed of it."""
    prompt = prompt_of(PROMPT)
    holds = CacheReferences(caches, prompt, "", 0)
    assert holds.look_up(on_disk=True) is None
    holds.release()
    caches.store_features("a", FakeFeatures()).release()
    caches.store_prefix(prompt, FakeSource(prompt), "")


def wanted(prompt: PromptKey, prefix_tokens: int, **features: int) -> DiskRead:
    """A load of so many tokens and of features, by key with their span."""
    by_span = {index: key for key, index in features.items()}
    return DiskRead(prompt, "", len(prompt), prefix_tokens, by_span, 1, 1)


def never() -> bool:
    return False


def test_caches_are_read_by_name_and_disk_comes_last() -> None:
    disk = LruCache[bytes]("disk", 30)
    caches = caches_on(FakeDisk(caches=(disk,)))
    assert [reading.name for reading in caches.stats()] == NAMES, "it is not open yet"
    caches.begin_serving()
    caches.pixels.put("a", b"1234", 4).release()
    readings = caches.stats()
    assert [reading.name for reading in readings] == [*NAMES, "disk"]
    assert [reading.size_bytes for reading in readings] == [0, 4, 0, 0, 0, 0, 0]
    assert [reading.limit_bytes for reading in readings] == [0, 10, 10, 0, 20, 0, 30]
    check_integrity(caches)
    assert [reading.name for reading in Caches().stats()] == NAMES


def test_warm_up_skips_disk_and_leaves_no_entries() -> None:
    disk = FakeDisk()
    caches = caches_on(disk)
    use(caches)
    assert disk.calls == []
    assert sum(reading.entries for reading in caches.stats()) == 2
    caches.begin_serving()
    assert not any(r.entries or r.hits or r.misses or r.evictions for r in caches.stats())
    use(caches)
    assert disk.calls == ["find 0 to 3", "find a", "store a", "store 4"]


def test_closed_disk_cache_is_not_used() -> None:
    disk = FakeDisk()
    caches = caches_on(disk)
    caches.begin_serving()
    caches.close(1.0)
    use(caches)
    assert disk.calls == ["close"]


def test_disk_lookup_reports_sizes_and_reads_no_file() -> None:
    """Memory is reserved for what is read, and for that its size must be known."""
    prompt = prompt_of([*PROMPT, ("b", 2, 9), ("c", 2, 9), 3])
    disk = FakeDisk({"b": FakeFeatures(5)}, LoadedSource(prompt_of(PROMPT)))
    caches = caches_on(disk)
    caches.begin_serving()
    holds = CacheReferences(caches, prompt, "", 0)
    load = holds.look_up(on_disk=True)
    assert load is not None
    assert (load.prefix_tokens, load.features, load.size_bytes) == (4, {1: "b"}, 4 + 5)
    assert load.transient_bytes == 2 * 5
    assert [load.covers(index) for index in range(3)] == [True, True, False]
    assert disk.calls == ["find 0 to 8", "find b", "find c"], "`a` is in the prefix"
    assert holds.look_up(on_disk=False) is None
    holds.release()


def test_entries_read_from_disk_are_stored_and_pinned() -> None:
    prompt = prompt_of([1, 2, 3])
    disk = FakeDisk({"a": FakeFeatures()}, LoadedSource(prompt))
    caches = caches_on(disk)
    caches.begin_serving()
    loaded = caches.read_disk(wanted(prompt_of([1, 2, 3, 4]), 3, a=0), never)
    assert loaded.prefix is not None
    assert (loaded.features[0].value, loaded.prefix.length) == (disk.features["a"], 3)
    assert (caches.features.stats().entries, caches.prefixes.stats().entries) == (1, 1)
    assert caches.num_references == 2
    loaded.release()
    assert caches.num_references == 0
    assert not loaded.is_out_of_memory


def test_cancelled_disk_read_reads_nothing() -> None:
    disk = FakeDisk({"a": FakeFeatures()}, LoadedSource(prompt_of([1, 2, 3])))
    caches = caches_on(disk)
    caches.begin_serving()
    loaded = caches.read_disk(wanted(prompt_of([1, 2, 3, 4]), 3, a=0), lambda: True)
    assert disk.calls == []
    loaded.release()
    assert caches.num_references == 0


def test_disk_prefix_that_cannot_be_copied_is_miss() -> None:
    prompt = prompt_of([1, 2, 3])
    caches = caches_on(FakeDisk(source=LoadedSource(prompt, failing=0)))
    caches.begin_serving()
    caches.prefixes.insert(prompt_of([1]), FakeSource(prompt_of([1])))
    loaded = caches.read_disk(wanted(prompt, 3), never)
    assert loaded.prefix is not None
    assert loaded.prefix.length == 1
    loaded.release()
    assert caches.num_references == caches.prefixes.stats().pinned_bytes == 0


@pytest.mark.parametrize("error", [OutOfMemory("too much"), MemoryError()], ids=["device", "host"])
def test_disk_read_reports_out_of_memory_and_keeps_earlier_entries(error: Exception) -> None:
    class ShortDisk(FakeDisk):
        def read_features(self, key: str) -> EncodedImage | None:
            raise error

    prompt = prompt_of([1, 2, 3])
    caches = caches_on(ShortDisk(source=LoadedSource(prompt)))
    caches.begin_serving()
    loaded = caches.read_disk(wanted(prompt, 3, a=0), never)
    assert loaded.is_out_of_memory
    assert loaded.prefix is not None
    assert loaded.prefix.length == 3, "what was read before is of use"
    loaded.release()
    assert caches.num_references == 0


def test_prefixes_are_evicted_before_features() -> None:
    caches = caches_on(FakeDisk())
    use(caches)
    caches.tiles.resize(3)
    caches.tiles.put("a", object(), 3).release()
    assert caches.evictable_bytes == 8
    assert caches.evict(2) == 4
    assert [r.entries for r in caches.stats()] == [0, 0, 1, 1, 0, 0]
    assert caches.evict(2) == 3, "a tile is less to encode again than an image"
    assert [r.entries for r in caches.stats()] == [0, 0, 1, 0, 0, 0]
    assert caches.evict(2) == 1
    assert caches.evictable_bytes == 0


def test_references_of_all_caches_are_counted() -> None:
    caches = caches_on(FakeDisk())
    prompt = prompt_of([1])
    held: list[Hold] = [
        caches.token_layouts.put("a", 0, 1),
        caches.pixels.put("a", 0, 1),
        caches.store_features("a", FakeFeatures()),
        caches.tiles.put("a", 0, 1),
        caches.prefixes.match(prompt, 1),
    ]
    for number, each in enumerate(held):
        assert caches.num_references == 5 - number
        each.release()
    assert caches.num_references == 0


def test_device_cache_limits_follow_available_memory() -> None:
    caches = Caches(
        pixel_bytes=10,
        encoder_bytes=10,
        prefix_bytes=20,
        tile_bytes=5,
        sizes=lambda free: DeviceSizes(free // 16, free // 32, free // 4),
    )
    use(caches)
    caches.resize(160)
    assert {each.name: each.limit_bytes for each in caches.stats()} == {
        "token_layout": 0,
        "pixel": 10,
        "encoder": 10,
        "tile": 5,
        "prefix": 40,
        "vector": 0,
    }
    assert "a" in caches.features
    caches.resize(0)
    assert "a" not in caches.features
    assert caches.evictable_bytes == 0
    check_integrity(caches)


def test_prefixes_of_minimum_size_are_evicted_after_features() -> None:
    sizes = DeviceSizes(encoder_bytes=10, tile_bytes=5, prefix_bytes=40, min_prefix_bytes=3)
    caches = Caches(sizes=lambda _: sizes)
    caches.resize(100)
    for first in range(6):
        prompt = prompt_of([first, 1])
        caches.store_prefix(prompt, FakeSource(prompt), "")
    caches.tiles.put("a", 0, 4).release()
    caches.store_features("a", FakeFeatures()).release()
    prefix_bytes = caches.prefixes.stats().size_bytes
    surplus_bytes = prefix_bytes - sizes.min_prefix_bytes
    assert caches.evict(surplus_bytes) >= surplus_bytes
    left_bytes = caches.prefixes.stats().size_bytes
    assert 0 < left_bytes <= sizes.min_prefix_bytes
    assert caches.evict(5) == 5, "tile and features"
    assert caches.prefixes.stats().size_bytes == left_bytes
    assert caches.evict(1) > 0
    assert caches.prefixes.stats().size_bytes < left_bytes


def test_resize_keeps_configured_cache_sizes() -> None:
    caches = caches_on(FakeDisk())
    caches.resize(1000)
    assert {each.limit_bytes for each in caches.stats()} == {0, 10, 20}


def test_drop_removes_only_unreferenced_entries() -> None:
    caches = caches_on(FakeDisk())
    use(caches)
    lease = caches.features.lease("a")
    assert lease is not None
    caches.drop()
    assert "a" in caches.features
    assert caches.prefixes.stats().entries == 0
    lease.release()
    caches.drop()
    assert "a" not in caches.features
    assert caches.stats()[2].hits == 1
