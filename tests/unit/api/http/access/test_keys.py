"""API keys from settings and file: access, rights, request limits, cache salts."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import FunctionType, ModuleType

import httpx
import pytest

from tests.support.clock import Clock
from tests.unit.api.conftest import Connect, parsing_pool
from tests.unit.api.requests import ROUTE, bearer, chat
from tests.unit.api.scripted_engine import HELLO, OneModel, ScriptedEngine
from vlm_server.api.app import create_app
from vlm_server.api.http.access import keys
from vlm_server.api.http.access.keys import CHECK_SECONDS, KeyRing
from vlm_server.errors import ConfigError
from vlm_server.settings import Server, Settings
from vlm_server.supervisor.engine_process.client import EngineClient

USER, ADMIN, OWN = "key-of-a-user", "key-of-the-admin", "key-in-the-settings"
KEYS = f'[user]\nkey = "{USER}"\nmax_requests = 2\n[boss]\nkey = "{ADMIN}"\nadmin = true\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "keys.toml", KEYS)


def write(path: Path, text: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(text)
    return path


def server(path: Path, *own: str) -> Server:
    return Server(api_keys=own, api_key_file=str(path))


@pytest.mark.parametrize("own", [(), (OWN,)])
async def test_keys_of_file_and_settings_are_accepted(
    connect: Connect, path: Path, own: tuple[str, ...]
) -> None:
    client = connect(Settings(server=server(path, *own)))
    for key, status in ((USER, 200), (ADMIN, 200), (OWN, 200 if own else 401), ("wrong", 401)):
        assert (await client.get("/v1/models", headers=bearer(key))).status_code == status
    assert (await client.get("/v1/models")).status_code == 401


@pytest.mark.parametrize("route", ["/v1/status", "/metrics"])
async def test_status_and_metrics_need_admin_key(connect: Connect, path: Path, route: str) -> None:
    client = connect(Settings(server=server(path, OWN)))
    for key in (ADMIN, OWN):
        assert (await client.get(route, headers=bearer(key))).status_code == 200
    refused = await client.get(route, headers=bearer(USER))
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    assert (await client.head(route, headers=bearer(USER))).status_code == 403
    assert (await client.get(route)).status_code == 401
    assert (await connect().get(route)).status_code == 200


async def test_two_authorization_headers_are_401(connect: Connect, path: Path) -> None:
    client = connect(Settings(server=server(path)))
    twice = [("authorization", f"Bearer {USER}"), ("authorization", f"Bearer {ADMIN}")]
    assert (await client.get("/v1/models", headers=twice)).status_code == 401


async def test_log_shows_name_of_key_and_hides_its_value(
    connect: Connect, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(Settings(server=server(path, OWN)))
    with caplog.at_level(logging.DEBUG):
        for key in (USER, ADMIN, OWN, "not-a-key"):
            await client.get("/v1/models", headers=bearer(key))
        await connect().get("/v1/models")
    lines = [r.getMessage() for r in caplog.records if r.name == "vlm_server.api"]
    assert [line.rpartition("key=")[2].split()[0] for line in lines] == [
        "user",
        "boss",
        "api_keys[0]",
        "-",
        "-",
    ]
    assert not any(key in caplog.text for key in (USER, ADMIN, OWN, "not-a-key"))


async def test_key_over_its_request_limit_is_429(
    connect: Connect, engine: ScriptedEngine, path: Path
) -> None:
    release = asyncio.Event()
    engine.script = (release, *HELLO)
    client = connect(Settings(server=server(path)))
    running = [
        asyncio.create_task(client.post(ROUTE, json=chat(), headers=bearer(USER))) for _ in range(2)
    ]
    await submissions(engine, 2)
    refused = await client.post(ROUTE, json=chat(), headers=bearer(USER))
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "key_limit_reached")
    assert refused.headers["retry-after"]
    resuming = bearer(USER) | {"Last-Event-ID": ""}  # no stream's
    refused = await asyncio.wait_for(client.post(ROUTE, json=chat(), headers=resuming), 10)
    assert refused.status_code == 429
    of_admin = asyncio.create_task(client.post(ROUTE, json=chat(), headers=bearer(ADMIN)))
    await submissions(engine, 3)
    release.set()
    assert [(await task).status_code for task in (*running, of_admin)] == [200] * 3
    assert (await client.post(ROUTE, json=chat(), headers=bearer(USER))).status_code == 200


async def submissions(engine: ScriptedEngine, count: int) -> None:
    async with asyncio.timeout(10):
        while len(engine.submitted) < count:  # noqa: ASYNC110  the engine offers no event
            await asyncio.sleep(0.001)


async def test_keys_keep_their_own_cache_salts(
    connect: Connect, engine: ScriptedEngine, path: Path
) -> None:
    client = connect(Settings(server=server(path)))
    for key in (USER, ADMIN, USER):
        await client.post(ROUTE, json=chat(), headers=bearer(key))
    alone = connect(Settings(server=Server(api_keys=(USER,))))
    await alone.post(ROUTE, json=chat(), headers=bearer(USER))
    first, second, *rest = (submit.cache_salt for submit in engine.submitted)
    assert rest == [first, first]
    assert len({first, second, ""}) == 3


def test_changed_key_file_applies_within_one_second(path: Path) -> None:
    clock = Clock(100.0)
    ring = KeyRing(server(path), clock)
    write(path, '[new]\nkey = "a-key-that-is-new"\n')
    assert ring.find(USER.encode())
    assert not ring.find(b"a-key-that-is-new")
    clock.now += CHECK_SECONDS
    assert not ring.find(USER.encode())
    assert ring.find(b"a-key-that-is-new")


def test_broken_or_missing_key_file_keeps_earlier_keys(path: Path) -> None:
    clock = Clock(100.0)
    write(path, '[new]\nkey = "a-key-that-is-new"\n')
    ring = KeyRing(server(path), clock)
    assert ring.find(b"a-key-that-is-new")
    for text in ("[broken", "", '[new]\nkey = " "\n'):
        write(path, text)
        clock.now += CHECK_SECONDS
        assert ring.find(b"a-key-that-is-new")
    path.unlink()
    clock.now += CHECK_SECONDS
    assert ring.find(b"a-key-that-is-new")


def test_key_file_is_checked_at_most_once_per_second(path: Path) -> None:
    clock = Clock(100.0)
    ring = KeyRing(server(path), clock)
    clock.now += CHECK_SECONDS
    ring.find(b"any")
    write(path, '[new]\nkey = "a-key-that-is-new"\n')
    clock.now += CHECK_SECONDS / 2
    assert not ring.find(b"a-key-that-is-new")


def test_key_ring_keeps_only_hashes_of_keys(path: Path) -> None:
    ring = KeyRing(server(path))
    key = ring.find(USER.encode())
    held = reachable(ring)
    assert any(value is key for value in held)
    assert not [value for value in held if isinstance(value, str | bytes) and USER in str(value)]


def reachable(root: object) -> list[object]:
    """All objects that `root` refers to, except code."""
    found: dict[int, object] = {}
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if id(value) not in found and not isinstance(value, type | ModuleType | FunctionType):
            found[id(value)] = value
            waiting += gc.get_referents(value)
    return list(found.values())


def test_unusable_key_file_stops_start(path: Path) -> None:
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        keys.check_settings(server(path))
    keys.check_settings(Server())


class Unpinned(OneModel):
    """A fake model that requests load and unload; `kept` records the requested times."""

    def __init__(self, engine: ScriptedEngine) -> None:
        super().__init__(engine)
        self.kept = list[float | None]()

    def is_pinned(self, name: str) -> bool:
        return False

    @asynccontextmanager
    async def lease(
        self, name: str, request_id: str, keep_alive_seconds: float | None = None
    ) -> AsyncIterator[EngineClient]:
        self.kept.append(keep_alive_seconds)
        async with super().lease(name, request_id, keep_alive_seconds) as engine:
            yield engine

    async def touch(
        self, name: str, request_id: str, keep_alive_seconds: float | None = None
    ) -> None:
        self.kept.append(keep_alive_seconds)


@pytest.mark.parametrize("wanted", [0, -1, "1ms", "24h"])
async def test_keep_alive_needs_admin_key(
    engine: ScriptedEngine, path: Path, wanted: float | str
) -> None:
    models = Unpinned(engine)
    app = create_app(Settings(server=server(path)), models, parsing_pool())
    request = {"model": "demo", "keep_alive": wanted, "stream": False}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000"
    ) as client:
        for body in (
            {**request, "prompt": "Hi"},
            {**request, "messages": chat()["messages"]},
            request,
        ):
            route = "/api/chat" if "messages" in body else "/api/generate"
            for key in (USER, ADMIN):
                models.kept.clear()
                answer = await client.post(route, json=body, headers=bearer(key))
                if key == ADMIN:
                    assert (answer.status_code, models.kept[0] is not None) == (200, True)
                    assert "x-vlm-ignored" not in answer.headers
                elif body is request and wanted == 0:
                    assert (answer.status_code, models.kept) == (403, [])
                else:
                    assert (answer.status_code, models.kept) == (200, [None])
                    assert answer.headers["x-vlm-ignored"] == "keep_alive"
