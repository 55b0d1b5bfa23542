"""A scrape of an application with answers, failures and cache entries: every metric has samples."""

from __future__ import annotations

import os
from dataclasses import replace

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.api.requests import ROUTE, chat
from tests.unit.api.scripted_engine import ScriptedEngine
from vlm_server.protocol import CacheStats, MemoryStats, Stats

MEMORY = MemoryStats(1, 2, 3, 4, 1, 6, 7, {"evict": 7}, 0.5)
STATS = Stats(
    {"prefill": 3},
    5,
    {"runner": 5},
    MEMORY,
    5000,
    caches=(CacheStats("prefix", 1, 10, 5, 50, 2, 3, 4),),
)


async def full_scrape(client: httpx.AsyncClient, engine: ScriptedEngine) -> str:
    """The text of `/metrics` after a request and a stream."""
    engine.status = replace(engine.status, stats=STATS, pid=os.getpid())
    for stream in (False, True):
        await client.post(ROUTE, json=chat(stream=stream))
    return (await client.get("/metrics")).text


def labels_of(text: str) -> dict[str, frozenset[str]]:
    """The labels of each metric in a scrape."""
    families = text_string_to_metric_families(text)
    return {
        sample.name: frozenset(sample.labels) for family in families for sample in family.samples
    }
