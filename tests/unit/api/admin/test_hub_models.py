"""Models to get: the catalog, searches of the hub, and for how long a loaded one is kept."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.hub.fixtures import hub, model
from tests.hub.server import Hub, add
from tests.unit.api.admin.test_administration import (
    LOAD,
    Pool,
    checkpoint,
    connected,
    operator,
    pool,
    settings,
)
from vlm_server.hub.catalog import CATALOG
from vlm_server.hub.names import HubName
from vlm_server.hub.search_process import MAX_FOUND
from vlm_server.protocol import MemoryStats, Stats
from vlm_server.settings import Server

__all__ = ["hub", "operator", "pool"]

GB = 10**9
SEARCH = "/v1/hub/search"


async def find(client: httpx.AsyncClient, query: str) -> dict[str, Any]:
    answer = await client.get(SEARCH, params={"query": query})
    assert answer.status_code == 200
    result: dict[str, Any] = answer.json()
    return result


async def test_catalog_has_fit_and_presence_of_models(
    operator: httpx.AsyncClient, pool: Pool, tmp_path: Path
) -> None:
    models = (await operator.get("/v1/hub/catalog")).json()["models"]
    assert {one["fits"] for one in models} == {None}, "the limit is not known yet"
    here = models[0]["name"]
    checkpoint(tmp_path / "disk" / here)
    memory = MemoryStats(0, 0, 0, 8 * GB, GB, 0, 0, {}, 0.0)
    pool.engine.status = replace(pool.engine.status, stats=Stats({}, 0, {}, memory, 0))
    models = (await operator.get("/v1/hub/catalog")).json()["models"]
    fits = [one["fits"] for one in models]
    assert fits[0]
    assert not fits[-1]
    assert sorted(fits, reverse=True) == fits, "by size"
    assert [one["name"] for one in models if one["here"]] == [here]


def test_catalog_has_names_of_hub_in_order_of_size() -> None:
    assert all(HubName.parse(entry.name) for entry in CATALOG)
    sizes = [entry.about_bytes for entry in CATALOG if entry.bits == 4]
    assert len({entry.name for entry in CATALOG}) == len(CATALOG)
    assert min(sizes) == CATALOG[0].about_bytes
    assert all(entry.about_bytes > entry.parameters * entry.bits / 8 * 0.95 for entry in CATALOG), (
        "no fewer bytes than its bits"
    )


async def test_search_finds_checkpoints_with_sizes(
    operator: httpx.AsyncClient, pool: Pool, hub: Hub
) -> None:
    memory = MemoryStats(0, 0, 0, 8 * GB, GB, 0, 0, {}, 0.0)
    pool.engine.status = replace(pool.engine.status, stats=Stats({}, 0, {}, memory, 0))
    add(hub, "org/Small-VL", model(), parameters={"U32": GB // 4, "BF16": GB // 2}, downloads=5)
    add(hub, "org/large-vl", model(), parameters={"BF16": 10 * GB}, downloads=9, gated=True)
    add(hub, "org/other", model())
    assert await find(operator, "-vl") == {
        "models": [
            {
                "name": "org/large-vl",
                "model_type": "qwen3_vl",
                "weight_bytes": 20 * GB,
                "downloads": 9,
                "is_gated": True,
                "fits": False,
                "here": False,
            },
            {
                "name": "org/Small-VL",
                "model_type": "qwen3_vl",
                "weight_bytes": 2 * GB,
                "downloads": 5,
                "is_gated": False,
                "fits": True,
                "here": False,
            },
        ],
        "problem": None,
    }
    (other,) = (await find(operator, "other"))["models"]
    assert (other["weight_bytes"], other["fits"]) == (0, None)
    assert (await find(operator, "no such model"))["models"] == []


async def test_search_returns_bounded_number_of_checkpoints(
    operator: httpx.AsyncClient, hub: Hub
) -> None:
    for number in range(MAX_FOUND + 5):
        add(hub, f"org/many-{number}", {})
    assert len((await find(operator, "many"))["models"]) == MAX_FOUND


async def test_search_says_why_there_is_no_hub(
    operator: httpx.AsyncClient, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.search_status = 503
    assert "answers 503" in (await find(operator, "x"))["problem"]
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "can't be reached" in (await find(operator, "x"))["problem"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in (await find(operator, "x"))["problem"]


async def test_searches_are_bounded_and_checked(operator: httpx.AsyncClient, hub: Hub) -> None:
    for query in ("", " ", "x" * 101, "a\nb"):
        assert (await operator.get(SEARCH, params={"query": query})).status_code == 400
    hub.search_seconds = 2.0
    answers = await asyncio.gather(*(operator.get(SEARCH, params={"query": "x"}) for _ in range(3)))
    assert sorted(answer.status_code for answer in answers) == [200, 200, 409]


async def test_search_and_catalog_need_admin_key(pool: Pool, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[laptop]\nkey = "laptop-key"\n')
    file.chmod(0o600)
    (tmp_path / "disk").mkdir()
    used = settings(tmp_path)
    server = Server(api_key_file=str(file))
    async with connected(pool, type(used)(server=server, model=used.model)) as client:
        for path in ("/v1/hub/catalog", f"{SEARCH}?query=x"):
            headers = {"authorization": "Bearer laptop-key"}
            assert (await client.get(path, headers=headers)).status_code == 403


@pytest.mark.parametrize("seconds", [-1, 60, 0])
async def test_load_says_for_how_long_model_is_kept(
    operator: httpx.AsyncClient, pool: Pool, seconds: float
) -> None:
    body = {"model": "second", "keep_alive_seconds": seconds}
    assert (await operator.post(LOAD, json=body)).status_code == 200
    assert pool.touched == [("second", seconds)]
    bad = await operator.post(LOAD, json=body | {"keep_alive_seconds": -2})
    assert bad.status_code == 400
