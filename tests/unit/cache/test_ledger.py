"""All caches, read and checked as one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.unit.cache.fakes import FakeSegment, FakeSnapshot
from vlm_server.cache.ledger import Ledger
from vlm_server.cache.lru import LruCache
from vlm_server.cache.prefix import PrefixCache
from vlm_server.protocol import CacheStats


@dataclass
class WrongCache:
    """Counts what it does not hold."""

    def read(self) -> CacheStats:
        return CacheStats("wrong", 1, 1, 0, 1, 0, 0, 0)

    def check_integrity(self) -> None:
        raise AssertionError("holds nothing")


def test_caches_are_read_in_the_order_that_they_were_given() -> None:
    pixels = LruCache[bytes]("pixel", 10)
    prefixes = PrefixCache[FakeSegment, FakeSnapshot]("prefix", 20)
    ledger = Ledger(pixels, prefixes)
    pixels.put("a", b"1234", 4).release()
    readings = ledger.read()
    assert readings == (pixels.read(), prefixes.read())
    assert [(each.name, each.size_bytes, each.limit_bytes) for each in readings] == [
        ("pixel", 4, 10),
        ("prefix", 0, 20),
    ]
    ledger.check_integrity()


def test_one_wrong_cache_is_told() -> None:
    ledger = Ledger(LruCache[bytes]("pixel", 10), WrongCache())
    with pytest.raises(AssertionError, match="holds nothing"):
        ledger.check_integrity()


def test_no_caches_are_nothing_to_read() -> None:
    assert Ledger().read() == ()
    Ledger().check_integrity()
