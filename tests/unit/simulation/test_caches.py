"""Simulated caches match stored prefixes, and evict the least recently used."""

from __future__ import annotations

import pytest

from scripts.simulation.caches import FeatureStore, PrefixStore

pytestmark = pytest.mark.unit


def test_prefix_store_matches_all_but_last_token():
    store = PrefixStore(1000, head_tokens=10)
    assert store.match("a", 100) == 0
    store.store("a", 100)
    assert store.match("a", 100) == 99
    assert store.match("a", 150) == 100
    assert store.match("b", 150) == 10


def test_prefix_store_evicts_ends_of_least_recent_first():
    store = PrefixStore(250, head_tokens=0)
    store.store("a", 60)
    store.store("a", 100)
    store.store("b", 100)
    store.match("a", 100)
    store.store("c", 100)
    assert store.match("b", 500) == 0
    store.store("d", 60)
    assert store.match("a", 500) == 60
    assert store.evicted_tokens == 140


def test_prefix_store_without_room_keeps_nothing():
    store = PrefixStore(0, head_tokens=10)
    store.store("a", 100)
    assert store.match("a", 200) == 0


def test_feature_store_evicts_least_recently_used():
    store = FeatureStore(100)
    for name in ("a", "b"):
        store.store(name, 50)
    assert "a" in store
    store.store("c", 50)
    assert "b" not in store
    assert "a" in store
