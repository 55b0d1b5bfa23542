"""`/v1/settings`: what automatic settings came to, and changes while the daemon runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.api.conftest import Connect
from tests.unit.api.requests import ROUTE, chat
from tests.unit.api.scripted_engine import ScriptedEngine, ended, finished, never
from vlm_server.api.admin.current_settings import effective_in
from vlm_server.protocol import CacheStats, MemoryStats, Stats
from vlm_server.settings import Server, Settings, load
from vlm_server.settings.topics import COMMON

STATS = Stats(
    {},
    0,
    {},
    MemoryStats(1, 2, 3, 4000, 5, 6, 7, {}, 0.0),
    0,
    caches=(CacheStats("prefix", 1, 20, 5, 50, 0, 0, 0),),
    max_num_seqs=12,
)


def by_name(answer: httpx.Response) -> dict[str, dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return {
        f"{section['name']}.{setting['name']}": setting
        for section in answer.json()["sections"]
        for setting in section["settings"]
    }


@pytest.fixture
def root_level() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


async def test_settings_show_values_of_automatic_ones(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    shown = by_name(await client.get("/v1/settings"))
    assert shown["memory.max_bytes"]["effective"] is None
    assert shown["limits.max_waiting_bytes"]["effective"] > 0
    engine.status = replace(engine.status, stats=STATS)
    shown = by_name(await client.get("/v1/settings"))
    assert shown["memory.max_bytes"]["effective"] == 4000
    assert shown["scheduler.max_num_seqs"]["effective"] == 12
    assert shown["cache.max_prefix_bytes"]["effective"] == 50
    assert effective_in(STATS).keys() <= shown.keys()


async def test_settings_name_common_ones_and_are_written_as_in_file(
    client: httpx.AsyncClient,
) -> None:
    answer = await client.get("/v1/settings")
    shown = by_name(answer)
    assert tuple(answer.json()["common"]) == COMMON
    assert set(COMMON) <= shown.keys()
    assert shown["deadlines.total_timeout_seconds"]["value_written"] == "1 h"
    assert shown["memory.max_bytes"]["default_written"] == "auto"
    assert shown["urls.https_hosts"]["value_written"] == []
    overrides = [
        f"{name}={','.join(value) if isinstance(value, list) else value}"
        for name, setting in shown.items()
        if (value := setting["value_written"]) not in ([], "") and name != "server.api_keys"
    ]
    assert load(None, tuple(overrides)) == Settings(), "what is written is read"


async def test_settings_tell_lists_and_texts_by_type(client: httpx.AsyncClient) -> None:
    shown = by_name(await client.get("/v1/settings"))
    assert shown["server.allowed_hosts"]["default_written"] == "auto"
    assert shown["server.allowed_hosts"]["is_list"], "whatever word stands for an empty list"
    for name, setting in shown.items():
        value, is_list, is_text = setting["value"], setting["is_list"], setting["is_text"]
        assert is_list or not isinstance(value, list), name
        assert not (is_text and (is_list or isinstance(value, int | float))), name
    texts = {name for name in COMMON if shown[name]["is_text"]}
    assert texts == {"model.path", "server.host", "server.api_key_file", "log.level"}


async def test_changed_deadline_is_for_next_requests(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    changed = await client.patch("/v1/settings", json={"deadlines.total_timeout_seconds": "100ms"})
    setting = by_name(changed)["deadlines.total_timeout_seconds"]
    assert (setting["value"], setting["source"]) == (0.1, "changed while running")
    assert setting["live"]
    engine.script = (never(),)
    answer = await client.post(ROUTE, json=chat())
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "total_timeout")


@pytest.mark.usefixtures("root_level")
async def test_changed_log_level_and_unknown_fields_apply_at_once(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    unknown = chat() | {"no_such_field": 1}
    assert (await client.post(ROUTE, json=unknown)).status_code == 400
    change = {"log.level": "error", "server.unknown_fields": "ignore"}
    await client.patch("/v1/settings", json=change)
    assert logging.getLogger().level == logging.ERROR
    engine.script = (ended(), finished())
    assert (await client.post(ROUTE, json=unknown)).status_code == 200


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("deadlines.total_timeout_seconds", -1, "deadlines.total_timeout_seconds"),
        ("deadlines.total_timeout_seconds", "soon", "deadlines.total_timeout_seconds"),
        ("deadlines.total_timeout_seconds", [1], "has to be a number"),
        ("deadlines.no_such", 1, "no_such"),
        ("server.port", 9000, "restart"),
        ("log.level", "loud", "log.level"),
        ("nonsense", 1, "nonsense"),
        ("models.other", {"path": "org/name"}, "models.other"),
    ],
)
async def test_wrong_change_is_refused_and_changes_nothing(
    client: httpx.AsyncClient, name: str, value: object, words: str
) -> None:
    change = {"deadlines.queue_timeout_seconds": 5, name: value}
    answer = await client.patch("/v1/settings", json=change)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name
    assert words in answer.json()["error"]["message"]
    shown = by_name(await client.get("/v1/settings"))
    assert shown["deadlines.queue_timeout_seconds"]["source"] == "default"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("server.port", 9000),
        ("server.allowed_hosts", ["my.example", "other.example"]),
        ("server.allowed_hosts", "auto"),
        ("memory.max_bytes", "75%"),
        ("cache.max_disk_bytes", "20 GB"),
        ("model.path", "mlx-community/Qwen3-VL-4B-Instruct-4bit"),
        ("model.path", "demo"),
        ("log.level", "debug"),
    ],
)
async def test_value_that_file_could_have_is_checked_and_changes_nothing(
    client: httpx.AsyncClient, name: str, value: object
) -> None:
    before = (await client.get("/v1/settings")).json()
    answer = await client.patch("/v1/settings?check=true", json={name: value})
    assert (answer.status_code, answer.content) == (204, b"")
    assert (await client.get("/v1/settings")).json() == before


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("server.port", 99999, "at most 65535"),
        ("server.port", "http", "a whole number"),
        ("server.host", "0.0.0.0", "can be reached from other machines"),
        ("server.api_key_file", "keys.toml", "is not absolute"),
        ("server.api_key_file", "/no/such/keys.toml", "can't read the API keys"),
        ("model.keep_alive_seconds", "10 min", "set `model.pinned = false`"),
        ("model.path", "/no/such/folder", "no checkpoint is at /no/such/folder"),
        ("model.path", "nothing", "no checkpoint is at nothing"),
        ("model.path", '"/no/such/folder"', "no checkpoint is at "),
        ("server.port", "0x" + "f" * 4000, "a whole number"),
        ("limits.max_requests", "{" + "a." * 1900 + "a=1}", "a whole number"),
        ("limits.max_requests", "9" * 5000, "4096 characters"),
        ("memory.max_bytes", "120%", "at most 100%"),
        ("cache.kv_bits", 5, "16, 8, 4 or auto"),
        ("limits.max_requests", 0, "at least 1"),
        ("urls.https_hosts", ["not a host"], "is not a host"),
    ],
)
async def test_value_that_would_stop_next_start_is_refused(
    client: httpx.AsyncClient, name: str, value: object, words: str
) -> None:
    answer = await client.patch("/v1/settings?check=true", json={name: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        r'{"server.api_key_file": "/a\u0000b"}',
        r'{"model.path": "./a\u0000b"}',
        r'{"model.path": "./a\ud800b"}',
        r'{"\ud800.x": 1}',
        '{"models..path": ""}',
        '{"models": {}}',
        '{"": {}}',
    ],
)
@pytest.mark.parametrize("query", ["", "?check=true"])
async def test_absurd_change_is_refused(client: httpx.AsyncClient, body: str, query: str) -> None:
    headers = {"content-type": "application/json"}
    answer = await client.patch(f"/v1/settings{query}", content=body, headers=headers)
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("given", ["True", "1", ""])
async def test_check_is_true_or_false(client: httpx.AsyncClient, given: str) -> None:
    before = (await client.get("/v1/settings")).json()
    body = {"deadlines.total_timeout_seconds": "1 s"}
    answer = await client.patch(f"/v1/settings?check={given}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "check")
    assert (await client.get("/v1/settings")).json() == before


async def test_path_is_checked_beside_settings_file(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("config/beside", "here/near"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "here")
    client = connect(settings_file=tmp_path / "config" / "config.toml")
    found = [
        (await client.patch("/v1/settings?check=true", json={"model.path": path})).status_code
        for path in ("beside", "./beside", "near", str(tmp_path / "here" / "near"))
    ]
    assert found == [204, 204, 400, 204]


async def test_change_is_checked_beside_other_settings(connect: Connect) -> None:
    with_key = connect(Settings(server=Server(api_keys=("correct-horse-battery",))))
    with_key.headers["authorization"] = "Bearer correct-horse-battery"
    answer = await with_key.patch("/v1/settings?check=true", json={"server.host": "0.0.0.0"})
    assert answer.status_code == 204, "a key is needed, as it has to be"


async def test_settings_tell_choices_units_and_words(client: httpx.AsyncClient) -> None:
    shown = by_name(await client.get("/v1/settings"))
    assert shown["cache.kv_bits"]["choices"] == [16, 8, 4, "auto"]
    assert shown["model.pinned"]["choices"] == [True, False]
    assert shown["server.port"]["choices"] == []
    assert (shown["memory.max_bytes"]["unit"], shown["memory.max_bytes"]["word"]) == (
        "bytes",
        "auto",
    )
    assert shown["model.keep_alive_seconds"]["word"] == "forever"
    shares = {name for name, setting in shown.items() if setting["is_share"]}
    assert shares == {"memory.max_bytes"}
