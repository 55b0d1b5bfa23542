"""Requests of one API key share cache entries; two keys do unless settings separate them."""

from __future__ import annotations

import hashlib

import httpx
import pytest

from tests.unit.api.conftest import Connect
from tests.unit.api.requests import ROUTE, chat
from tests.unit.api.scripted_engine import ScriptedEngine
from vlm_server.settings import CacheSettings, Server, Settings

ONE, OTHER = "correct-horse-battery", "second-key-é"
TWO_KEYS = Server(api_keys=(ONE, OTHER))


async def ask(client: httpx.AsyncClient, authorization: str) -> None:
    headers = [(b"authorization", authorization.encode())]
    assert (await client.post(ROUTE, json=chat(), headers=headers)).status_code == 200


async def salts(client: httpx.AsyncClient, engine: ScriptedEngine, *keys: str) -> list[str]:
    """The salts the engine gets from requests with each of `keys` in turn."""
    engine.submitted.clear()
    for key in keys:
        await ask(client, f"Bearer {key}")
    return [submit.cache_salt for submit in engine.submitted]


async def test_cache_salts_of_two_keys_differ(connect: Connect, engine: ScriptedEngine) -> None:
    client = connect(Settings(server=TWO_KEYS))
    one, other, again = await salts(client, engine, ONE, OTHER, ONE)
    assert one == again
    assert len({one, other, ""}) == 3


async def test_cache_salt_depends_on_key_only(connect: Connect, engine: ScriptedEngine) -> None:
    client = connect(Settings(server=TWO_KEYS))
    await ask(client, f"Bearer {ONE}")
    await ask(client, f"bearer   {ONE}")
    turned = connect(Settings(server=Server(api_keys=(OTHER, ONE, ONE))))
    await ask(turned, f"Bearer {ONE}")
    assert len({submit.cache_salt for submit in engine.submitted}) == 1


async def test_cache_salt_does_not_reveal_key(connect: Connect, engine: ScriptedEngine) -> None:
    (salt,) = await salts(connect(Settings(server=TWO_KEYS)), engine, ONE)
    assert ONE not in salt
    assert salt != hashlib.sha256(ONE.encode()).hexdigest()


@pytest.mark.parametrize("separate", [True, False])
async def test_requests_share_cache_without_keys(
    connect: Connect, engine: ScriptedEngine, separate: bool
) -> None:
    client = connect(Settings(cache=CacheSettings(separate_api_keys=separate)))
    assert await salts(client, engine, ONE, OTHER) == ["", ""]


async def test_requests_share_cache_if_separation_is_off(
    connect: Connect, engine: ScriptedEngine
) -> None:
    client = connect(Settings(server=TWO_KEYS, cache=CacheSettings(separate_api_keys=False)))
    assert await salts(client, engine, ONE, OTHER) == ["", ""]
