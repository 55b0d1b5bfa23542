"""Operators' routes: load, unload, pull, cancel, clear caches, list checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.hub.fixtures import NAME, hub, model
from tests.hub.server import Hub, add
from tests.unit.api.conftest import parsing_pool
from tests.unit.api.scripted_engine import OneModel, ScriptedEngine
from vlm_server.api.admin.pulls import Pulls
from vlm_server.api.app import create_app
from vlm_server.errors import EngineUnavailable, ModelDoesNotFit
from vlm_server.hub.names import HubName
from vlm_server.protocol import MemoryStats, RequestProgress, Stats
from vlm_server.settings import ListedModel, MemorySettings, ModelSettings, Server, Settings
from vlm_server.supervisor.engine_process.client import EngineStatus

__all__ = ["hub"]

MIB = 1 << 20
LOAD, UNLOAD, PULL, CANCEL = (
    f"/v1/models/{each}" for each in ("load", "unload", "pull", "pull/cancel")
)
CONFIG = '{"model_type": "qwen3_vl", "vision_config": {}}'


class Pool(OneModel):
    """A fake pool of a pinned model and `second`, which is not pinned; records its calls."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine()
        super().__init__(self.engine, ("gpt-*", "fast"))
        self.second = EngineStatus("unloaded", "second")
        self.added: list[str] = []
        self.cleared: list[str] = []
        self.touched: list[tuple[str, float | None]] = []
        self.failure: Exception | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (*super().names, "second", *self.added)

    def is_pinned(self, name: str) -> bool:
        return name == "demo"

    def status(self, name: str) -> EngineStatus:
        if name == "demo":
            return self.engine.status
        return self.second if name == "second" else EngineStatus("ready", name)

    async def load(self, name: str) -> None:
        if self.failure:
            raise self.failure
        if name == "second":
            self.second = replace(self.second, state="ready")

    async def touch(
        self, name: str, request_id: str, keep_alive_seconds: float | None = None
    ) -> None:
        self.touched.append((name, keep_alive_seconds))

    async def unload(self, name: str) -> None:
        if name == "demo":
            await super().unload(name)
        self.second = replace(self.second, state="unloaded")

    def clear_caches(self, name: str) -> None:
        if not self.status(name).is_ready:
            raise EngineUnavailable(f"The model `{name}` is not loaded.")
        self.cleared.append(name)

    def add(self, name: str) -> str:
        self.added.append(name)
        return name


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
async def operator(hub: Hub, pool: Pool, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    (tmp_path / "disk").mkdir()
    async with connected(pool, settings(tmp_path)) as client:
        yield client


def settings(tmp_path: Path, **more: Any) -> Settings:
    return Settings(
        model=ModelSettings(search_folders=(str(tmp_path / "disk"),)),
        **more,
    )


@contextlib.asynccontextmanager
async def connected(pool: Pool, used: Settings) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(used, pool, parsing_pool())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        yield client


def checkpoint(folder: Path, num_bytes: int = 10, config: str = CONFIG) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config)
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(num_bytes)


async def post(client: httpx.AsyncClient, route: str, name: str) -> tuple[int, Any]:
    answer = await client.post(route, json={"model": name})
    body = answer.json()
    return answer.status_code, body.get("error", body)


# ---- load, unload, clear ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo", "default", "fast", "gpt-4o"])
async def test_load_accepts_every_name_of_served_model(
    operator: httpx.AsyncClient, pool: Pool, name: str
) -> None:
    assert await post(operator, LOAD, name) == (200, {"model": "demo", "state": "ready"})
    assert pool.added == []


async def test_unload_refuses_pinned_models_with_conflict(
    operator: httpx.AsyncClient, pool: Pool
) -> None:
    assert await post(operator, LOAD, "second") == (200, {"model": "second", "state": "ready"})
    assert await post(operator, UNLOAD, "second") == (200, {"model": "second", "state": "unloaded"})
    status, error = await post(operator, UNLOAD, "demo")
    assert (status, error["code"]) == (409, "conflict")
    assert "pinned" in error["message"]


async def test_checkpoint_wins_over_pattern(
    operator: httpx.AsyncClient, pool: Pool, tmp_path: Path
) -> None:
    checkpoint(tmp_path / "disk/gpt-vision")
    assert await post(operator, LOAD, "gpt-vision") == (
        200,
        {"model": "gpt-vision", "state": "ready"},
    )
    assert pool.added == ["gpt-vision"]


@pytest.mark.parametrize("route", [UNLOAD, "/v1/caches/clear"])
async def test_unload_and_clear_serve_no_further_checkpoint(
    operator: httpx.AsyncClient, pool: Pool, tmp_path: Path, route: str
) -> None:
    checkpoint(tmp_path / "disk/other")
    status, error = await post(operator, route, "other")
    assert (status, error["code"], pool.added) == (404, "model_not_found", [])
    assert "`second`" in error["message"]


@pytest.mark.parametrize(
    "name", ["", ".", "..", "here", "./here", "sub/here", "/etc", "~", "a/b/c", "x\0y", "n" * 5000]
)
async def test_load_refuses_paths_of_folders(
    operator: httpx.AsyncClient,
    pool: Pool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path / "here")
    checkpoint(tmp_path / "sub/here")
    status, error = await post(operator, LOAD, name)
    assert (status, error["code"], pool.added) == (404, "model_not_found", [])
    assert len(error["message"]) < 300


async def test_ambiguous_checkpoint_name_is_refused_without_paths(
    operator: httpx.AsyncClient, pool: Pool, tmp_path: Path
) -> None:
    for org in ("one", "two"):
        checkpoint(tmp_path / f"disk/{org}/twin")
    status, error = await post(operator, LOAD, "twin")
    assert (status, error["code"], pool.added) == (409, "conflict", [])
    assert str(tmp_path) not in error["message"]
    assert (await post(operator, LOAD, "two/twin"))[0] == 200


async def test_failed_load_returns_its_reason_to_operators(
    operator: httpx.AsyncClient, pool: Pool
) -> None:
    pool.second = replace(pool.second, state="failed", error="its weights are GGUF")
    pool.failure = EngineUnavailable("The server's log says why.", "model", 5.0)
    answer = await operator.post(LOAD, json={"model": "second"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert "its weights are GGUF" in answer.json()["error"]["message"]
    pool.failure = ModelDoesNotFit("It needs 5 GiB; the limit is 4 GiB.")
    assert (await post(operator, LOAD, "second"))[1]["code"] == "model_does_not_fit"


async def test_clear_empties_caches_of_one_or_all_loaded_models(
    operator: httpx.AsyncClient, pool: Pool
) -> None:
    assert (await operator.post("/v1/caches/clear", json={})).json() == {"cleared": ["demo"]}
    assert (await post(operator, "/v1/caches/clear", "second"))[0] == 503
    pool.second = replace(pool.second, state="ready")
    assert (await post(operator, "/v1/caches/clear", "second"))[0] == 200
    assert pool.cleared == ["demo", "second"]


@pytest.mark.parametrize("route", [LOAD, UNLOAD, PULL, CANCEL, "/v1/caches/clear"])
@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"[]", 400),
        (b'{"model": 1}', 400),
        (b'{"model": "\\ud800"}', 400),
        (b'{"model": "demo", "force": true}', 400),
        (b'{"model": "' + b"n" * (1 << 20) + b'"}', 413),
    ],
)
async def test_wrong_administration_bodies_have_their_status(
    operator: httpx.AsyncClient, route: str, content: bytes, status: int
) -> None:
    headers = {"content-type": "application/json"}
    assert (await operator.post(route, content=content, headers=headers)).status_code == status


@pytest.mark.parametrize("route", [LOAD, UNLOAD, PULL, CANCEL, "/v1/caches/clear"])
async def test_administration_body_without_json_content_type_is_415(
    operator: httpx.AsyncClient, route: str
) -> None:
    assert (await operator.post(route, content=b'{"model": "demo"}')).status_code == 415


async def test_administration_routes_need_admin_key(pool: Pool, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[laptop]\nkey = "laptop-key"\n')
    file.chmod(0o600)
    async with connected(pool, Settings(server=Server(api_key_file=str(file)))) as client:
        client.headers["authorization"] = "Bearer laptop-key"
        for route in (LOAD, UNLOAD, PULL, CANCEL, "/v1/caches/clear"):
            assert (await post(client, route, "second"))[1]["code"] == "forbidden"
        assert (await client.get("/v1/checkpoints")).status_code == 403
    assert pool.second.state == "unloaded"


# ---- pull ------------------------------------------------------------------------------


async def lines_of(client: httpx.AsyncClient, name: str = NAME) -> list[dict[str, Any]]:
    answer = await client.post(PULL, json={"model": name})
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


async def under_way(client: httpx.AsyncClient) -> dict[str, Any]:
    """The only download in the list, once it has received bytes."""
    async with asyncio.timeout(20):
        while True:
            pulls = (await client.get("/v1/checkpoints")).json()["pulls"]
            if pulls and pulls[0].get("bytes", 0) > 0:
                found: dict[str, Any] = pulls[0]
                return found
            await asyncio.sleep(0.05)


@pytest.fixture
def always_servable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the check before a download: it takes seconds, and has its own tests."""

    async def approve(*_: object) -> None:
        pass

    monkeypatch.setattr("vlm_server.hub.download.check_plan", approve)


@pytest.mark.usefixtures("always_servable")
async def test_concurrent_pulls_share_one_download_and_are_listed(
    operator: httpx.AsyncClient, hub: Hub
) -> None:
    add(hub, NAME, model(4 * MIB))
    hub.seconds_per_mib = 0.3
    watchers = [asyncio.create_task(lines_of(operator)) for _ in range(2)]
    listed = await under_way(operator)
    assert (listed["state"], listed["model"]) == ("downloading", NAME)
    assert 0 < listed["bytes"] < listed["total_bytes"]
    first, second = await asyncio.gather(*watchers)
    assert first[-1] == second[-1] == {"state": "done", "model": NAME}
    assert first[0]["state"] == "downloading"
    assert hub.sent_bytes["model.safetensors"] == 4 * MIB
    listing = (await operator.get("/v1/checkpoints")).json()
    assert listing["pulls"] == []
    (found,) = listing["checkpoints"]
    assert (found["name"], found["place"], found["complete"]) == (NAME, "hub cache", True)
    assert (found["bytes"], found["served"]) == (4 * MIB, False)


@pytest.mark.usefixtures("always_servable")
async def test_cancelled_pull_resumes_where_it_ended(operator: httpx.AsyncClient, hub: Hub) -> None:
    add(hub, NAME, model(24 * MIB))
    hub.seconds_per_mib = 0.1
    watcher = asyncio.create_task(lines_of(operator))
    await under_way(operator)
    assert (await post(operator, CANCEL, NAME))[0] == 200
    assert (await watcher)[-1] == {"state": "cancelled", "model": NAME}
    assert (await post(operator, CANCEL, NAME))[0] == 404
    hub.seconds_per_mib = 0.0
    assert (await lines_of(operator))[-1]["state"] == "done"


async def test_pull_cancelled_before_its_begin_ends_as_cancelled() -> None:
    name = HubName(NAME)
    pulls = Pulls(Settings())
    pull = pulls.start(name)
    assert pulls.cancel(name)
    async with asyncio.timeout(5):
        lines = [json.loads(line) async for line in pull.lines()]
    assert lines[-1] == {"state": "cancelled", "model": NAME}
    assert pulls.to_json() == []


async def test_failed_pull_reports_its_error_and_can_be_retried(
    operator: httpx.AsyncClient, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = (await lines_of(operator, "org/none"))[-1]
    assert (last["state"], last["model"]) == ("failed", "org/none")
    assert "org/none" in last["error"]

    async def broken(*_: object) -> None:
        raise RuntimeError("unexpected")

    monkeypatch.setattr("vlm_server.api.admin.pulls.fetch", broken)
    for _ in range(2):
        last = (await lines_of(operator))[-1]
        assert last == {
            "state": "failed",
            "model": NAME,
            "error": "The server failed; its log says why.",
        }


@pytest.mark.parametrize("name", ["name", "../x", "a/b/c", "", "https://huggingface.co/org/name"])
async def test_pull_accepts_only_hub_names(operator: httpx.AsyncClient, name: str) -> None:
    status, error = await post(operator, PULL, name)
    assert (status, error["param"]) == (400, "model")


# ---- checkpoints on this machine, and status of several models --------------------------


def with_memory(limit: int, baseline: int, *progress: RequestProgress) -> Stats:
    memory = MemoryStats(baseline, 0, 0, limit, baseline, 0, 0, {}, 0.0)
    return Stats({}, 0, {}, memory, 0, progress=progress)


async def test_checkpoint_list_shows_fit_and_serving(hub: Hub, pool: Pool, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    checkpoint(disk / "org/listed", 100 * MIB)
    checkpoint(disk / "small", 100 * MIB)
    checkpoint(disk / "large", 500 * MIB)
    checkpoint(disk / "text", 10, '{"model_type": "llama"}')
    (disk / "org/partial").mkdir()
    (disk / "org/partial/config.json").write_text(CONFIG)
    listed = {"second": ListedModel(path="org/listed")}
    async with connected(pool, settings(tmp_path, models=listed)) as client:

        async def listed() -> dict[str, tuple[Any, ...]]:
            found = (await client.get("/v1/checkpoints")).json()["checkpoints"]
            keys = ("bytes", "fits", "served", "complete")
            return {
                checkpoint_json["name"]: tuple(checkpoint_json[key] for key in keys)
                for checkpoint_json in found
            }

        assert (await listed())["small"] == (100 * MIB, None, False, True)
        stats = with_memory(1000 * MIB, 200 * MIB)
        pool.engine.status = replace(pool.engine.status, stats=stats)
        assert await listed() == {
            "org/listed": (100 * MIB, True, True, True),
            "small": (100 * MIB, True, False, True),
            "large": (500 * MIB, False, False, True),
            "org/partial": (0, True, False, False),
        }
    limited = settings(
        tmp_path, memory=MemorySettings(max_bytes=700 * MIB, min_model_room_bytes=MIB)
    )
    async with connected(pool, limited) as client:
        shown = (await client.get("/v1/checkpoints")).json()["checkpoints"]
    assert {
        checkpoint_json["name"]: checkpoint_json["needed_bytes"] // MIB for checkpoint_json in shown
    }["large"] == 501


async def test_model_list_shows_load_progress(operator: httpx.AsyncClient, pool: Pool) -> None:
    pool.second = replace(pool.second, state="starting", progress=("loading weights", 0.4))
    first, second = (await operator.get("/v1/models")).json()["data"]
    assert "progress" not in first
    assert second["state"] == "starting"
    assert second["progress"] == {"stage": "loading weights", "fraction": 0.4}


async def test_request_list_shows_progress_from_each_requests_engine(
    operator: httpx.AsyncClient, pool: Pool
) -> None:
    pool.engine.script = (asyncio.Event(),)
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
    task = asyncio.create_task(operator.post("/v1/chat/completions", json=body))
    await asyncio.wait_for(pool.engine.waiting.wait(), 5)
    (request,) = (await operator.get("/v1/status")).json()["requests"]["list"]
    stats = with_memory(10, 1, RequestProgress(request["id"], "decode", 7, 100))
    pool.engine.status = replace(pool.engine.status, stats=stats)
    (request,) = (await operator.get("/v1/status?model=second")).json()["requests"]["list"]
    assert (request["model"], request["state"], request["done"]) == ("demo", "decode", 7)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
