"""Batches over HTTP, whose lines a scripted engine answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.support.waiting import until
from tests.unit.api.batches.conftest import FAST, KEYS, ROUTE, Line, Start
from tests.unit.api.dialects.openai.test_embeddings import vectors
from tests.unit.api.requests import bearer, chat, user
from tests.unit.api.scripted_engine import HELLO, ScriptedEngine, Step, failed
from vlm_server.api.batches import lane
from vlm_server.platform import conditions
from vlm_server.settings import FileSettings, Server


def line(name: str, **fields: Any) -> Line:
    body = chat(user(f"say {name}"))
    return {"custom_id": name, "method": "POST", "url": ROUTE, "body": body, **fields}


# ---- results ---------------------------------------------------------------------------


async def test_lines_are_answered_as_requests_are(start: Start, engine: ScriptedEngine) -> None:
    daemon = start()
    direct = (await daemon.client.post(ROUTE, json=chat(user("say a")))).json()
    bad = line("bad", body=chat(user("x"), temperature=9))
    batch = await daemon.create(line("a"), bad, "", line("b"), metadata={"for": "me"})
    assert (batch["status"], batch["metadata"]) == ("validating", {"for": "me"})
    batch = await daemon.ended(batch)
    assert batch["status"] == "completed", batch
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    output = await daemon.read(batch["output_file_id"])
    assert [each["custom_id"] for each in output] == ["a", "b"]
    response = output[0]["response"]
    assert (response["status_code"], output[0]["error"]) == (200, None)
    assert response["body"]["choices"] == direct["choices"]
    assert response["request_id"] in response["body"]["id"]
    errors = await daemon.read(batch["error_file_id"])
    assert [each["custom_id"] for each in errors] == ["bad"]
    assert errors[0]["response"]["status_code"] == 400
    assert errors[0]["response"]["body"]["error"]["param"] == "temperature"
    assert [submit.messages[0].content for submit in engine.submitted[1:]]  # both reached it
    assert len(engine.submitted) == 3
    listed = (await daemon.client.get("/v1/batches")).json()
    assert [each["id"] for each in listed["data"]] == [batch["id"]]
    file = (await daemon.client.get(f"/v1/files/{batch['output_file_id']}")).json()
    assert file["purpose"] == "batch_output"


@pytest.mark.parametrize(
    ("bad", "code", "number"),
    [
        ("{nonsense", "invalid_json_line", 2),
        ('{"custom_id": "b", "method": "POST"}', "invalid_request", 2),
        (line("a"), "duplicate_custom_id", 2),
        (line(""), "invalid_custom_id", 2),
        (line("b", url="/v1/embeddings"), "invalid_url", 2),
        (line("b", method="GET"), "invalid_method", 2),
        (line("b", body=chat(stream=True)), "invalid_request", 2),
        (line("b" * 600), "invalid_custom_id", 2),
        (line("b", body={"x": "y" * 2000}), "line_too_large", 2),
    ],
)
async def test_bad_line_fails_batch_before_any_runs(
    start: Start, engine: ScriptedEngine, bad: Any, code: str, number: int
) -> None:
    daemon = start(structs.replace(FAST, max_line_bytes=1500))
    batch = await daemon.ended(await daemon.create(line("a"), bad))
    assert (batch["status"], batch["output_file_id"]) == ("failed", None)
    fault = batch["errors"]["data"][0]
    assert (fault["code"], fault["line"]) == (code, number)
    assert not engine.submitted


async def test_file_has_bounded_number_of_lines(start: Start, engine: ScriptedEngine) -> None:
    daemon = start(structs.replace(FAST, max_lines=2))
    batch = await daemon.ended(await daemon.create(*(line(str(i)) for i in range(3))))
    assert batch["errors"]["data"][0]["code"] == "too_many_tasks"
    batch = await daemon.ended(await daemon.create(""))
    assert batch["errors"]["data"][0]["code"] == "empty_file"
    assert not engine.submitted


async def test_results_are_bounded_in_bytes(start: Start) -> None:
    daemon = start(structs.replace(FAST, max_output_bytes=1500))
    batch = await daemon.ended(await daemon.create(*(line(str(i)) for i in range(9))))
    counts = batch["request_counts"]
    assert 0 < counts["completed"] < 4
    assert counts["failed"] == 9 - counts["completed"]
    errors = await daemon.read(batch["error_file_id"])
    assert errors[-1]["error"]["code"] == "output_too_large"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"endpoint": "/v1/tokenize"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"colour": "red"}, "colour"),
    ],
)
async def test_wrong_field_is_refused_by_name(
    start: Start, fields: dict[str, Any], param: str
) -> None:
    daemon = start(server=Server(unknown_fields="refuse"))
    file_id = await daemon.upload(line("a"))
    body = {"input_file_id": file_id, "endpoint": ROUTE, "completion_window": "24h", **fields}
    answer = await daemon.client.post("/v1/batches", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)


# ---- gaps ------------------------------------------------------------------------------


async def test_request_interrupts_lines_and_they_run_again(
    start: Start, engine: ScriptedEngine
) -> None:
    daemon, answer = start(), engine.script
    engine.script = (asyncio.Event(),)
    batch = await daemon.create(line("a"), line("b"))
    await until(lambda: daemon.lane.num_running == 2)
    engine.script = (gate := asyncio.Event(), *answer)
    asking = asyncio.create_task(daemon.client.post(ROUTE, json=chat()))
    await until(lambda: len(engine.submitted) == 3 and not daemon.lane.num_running)
    assert len(engine.aborted) == 2
    await asyncio.sleep(0.4)
    assert (await daemon.batch(batch))["paused"] == "interactive_requests"
    status = (await daemon.client.get("/v1/status")).json()["batches"]
    assert (status["paused"], status["running_lines"]) == ("interactive_requests", 0)
    assert status["lines"]["interrupted"] == 2
    gate.set()
    assert (await asking).status_code == 200
    batch = await daemon.ended(batch)
    assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    assert len(engine.submitted) == 5


async def test_battery_interrupts_lines_until_machine_is_on_mains(
    start: Start, engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supply = tmp_path / "sys/class/power_supply/BAT0"
    supply.mkdir(parents=True)
    (supply / "type").write_text("Battery\n")
    monkeypatch.setattr(conditions, "_ROOT", tmp_path)
    monkeypatch.setattr(lane, "_STRAIN_SECONDS", 0.1)
    daemon, answer = start(structs.replace(FAST, on_battery=False)), engine.script
    engine.script = (asyncio.Event(),)
    batch = await daemon.create(line("a"))
    await until(lambda: daemon.lane.num_running == 1)
    (supply / "status").write_text("Discharging\n")
    await until(lambda: daemon.lane.paused == "on_battery" and not daemon.lane.num_running)
    assert (await daemon.batch(batch))["paused"] == "on_battery"
    metrics = (await daemon.client.get("/metrics")).text
    assert 'vlm_server_batches_paused{reason="on_battery"} 1.0' in metrics
    engine.script = answer
    (supply / "status").write_text("Charging\n")
    assert (await daemon.ended(batch))["request_counts"]["completed"] == 1


async def test_lines_ask_for_vectors(start: Start, engine: ScriptedEngine) -> None:
    daemon, path = start(), "/v1/embeddings"
    engine.script = (vectors([0.5, -0.25], [1 / 3, 2.0]),)
    body = {"model": "demo", "input": ["hi", "ho"]}
    direct = (await daemon.client.post(path, json=body)).json()
    good = line("a", url=path, body=body)
    packed = line("b", url=path, body=body | {"encoding_format": "base64"})
    bad = line("c", url=path, body={"model": "demo", "input": []})
    batch = await daemon.ended(await daemon.create(good, packed, bad, endpoint=path))
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    first, second = [
        each["response"]["body"] for each in await daemon.read(batch["output_file_id"])
    ]
    assert first == direct
    assert isinstance(second["data"][0]["embedding"], str)
    (failed,) = await daemon.read(batch["error_file_id"])
    assert failed["response"]["body"]["error"]["param"] == "input"


async def test_lines_take_no_slots_of_requests(start: Start, engine: ScriptedEngine) -> None:
    daemon = start()
    engine.script = (asyncio.Event(),)
    await daemon.create(*(line(str(i)) for i in range(9)))
    await until(lambda: len(engine.submitted) == FAST.max_running)
    status = (await daemon.client.get("/v1/status")).json()
    assert status["requests"]["in_flight"] == 0
    assert len(status["requests"]["list"]) == FAST.max_running


async def test_cancelled_batch_keeps_results(start: Start, engine: ScriptedEngine) -> None:
    daemon = start(structs.replace(FAST, max_running=1))
    engine.script = (gate := asyncio.Event(), *HELLO)
    batch = await daemon.create(line("a"), line("b"))
    await until(lambda: engine.submitted)
    engine.script = (asyncio.Event(),)
    gate.set()
    await until(lambda: len(engine.submitted) == 2)
    answer = await daemon.client.post(f"/v1/batches/{batch['id']}/cancel")
    assert answer.json()["status"] in ("cancelling", "cancelled")
    batch = await daemon.ended(batch)
    assert (batch["status"], batch["request_counts"]["completed"]) == ("cancelled", 1)
    assert [each["custom_id"] for each in await daemon.read(batch["output_file_id"])] == ["a"]
    assert (await daemon.client.post(f"/v1/batches/{batch['id']}/cancel")).status_code == 200
    assert not daemon.lane.num_running


async def test_overloaded_line_is_tried_three_times(start: Start, engine: ScriptedEngine) -> None:
    daemon = start()
    engine.script = (failed("engine_died", "gone"),)
    batch = await daemon.ended(await daemon.create(line("a")))
    assert (batch["request_counts"]["failed"], len(engine.submitted)) == (1, 3)


# ---- restarts and keys -----------------------------------------------------------------


async def test_restarted_daemon_runs_only_lines_without_result(
    start: Start, engine: ScriptedEngine, tmp_path: Path
) -> None:
    kept: Any = {"files": FileSettings(folder=str(tmp_path / "files"))}
    daemon = start(structs.replace(FAST, max_running=1), **kept)
    script: tuple[Step, ...] = engine.script
    batch = await daemon.create(*(line(str(i)) for i in range(500)))
    await until(lambda: daemon.lane.lines["completed"] >= 2)
    engine.script = (asyncio.Event(),)
    await daemon.stop()
    done = daemon.lane.lines["completed"]
    engine.script, before = script, len(engine.submitted)
    again = start(**kept)
    batch = await again.ended(batch)
    assert batch["request_counts"] == {"total": 500, "completed": 500, "failed": 0}
    assert len(engine.submitted) - before == 500 - done > 0
    output = await again.read(batch["output_file_id"])
    assert [each["custom_id"] for each in output] == [str(i) for i in range(500)]


async def test_expired_batch_has_errors_for_lines_without_result(
    start: Start, engine: ScriptedEngine, tmp_path: Path
) -> None:
    daemon = start(structs.replace(FAST, max_running=1))
    engine.script = (gate := asyncio.Event(), *HELLO)
    batch = await daemon.create(line("a"), line("b"))
    await until(lambda: engine.submitted)
    engine.script = (asyncio.Event(),)
    gate.set()
    await until(lambda: len(engine.submitted) == 2)
    store = daemon.lane.begin(daemon.app)
    found = store.find("", batch["id"])
    assert found is not None
    store.change(found, expires_at=1)
    batch = await daemon.ended(batch)
    assert batch["status"] == "expired"
    assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    errors = await daemon.read(batch["error_file_id"])
    assert [(each["custom_id"], each["error"]["code"]) for each in errors] == [
        ("b", "batch_expired")
    ]


async def test_key_that_came_later_takes_turns_with_first(
    start: Start, engine: ScriptedEngine
) -> None:
    """It does not run as many lines first as the other has run before."""
    daemon = start(structs.replace(FAST, max_running=1), server=Server(api_keys=KEYS))
    mine, other = bearer(KEYS[0]), bearer(KEYS[1])
    await daemon.ended(
        await daemon.create(*map(line, "abcdefghijklmnopqrst"), headers=mine), **mine
    )
    before, script = len(engine.submitted), engine.script
    engine.script = (gate := asyncio.Event(), *HELLO)
    batches = [
        await daemon.create(*(line(f"{owner}{i}") for i in range(10)), headers=headers)
        for owner, headers in (("mine", mine), ("other", other))
    ]
    await until(lambda: daemon.lane.num_running == 1)
    engine.script = script
    gate.set()
    for batch, headers in zip(batches, (mine, other), strict=True):
        await daemon.ended(batch, **headers)
    clients = [submit.client for submit in engine.submitted[before:]]
    assert 4 <= clients[:10].count("api_keys[0]") <= 6, clients


async def test_batch_belongs_to_its_key(start: Start, engine: ScriptedEngine) -> None:
    daemon = start(server=Server(api_keys=KEYS))
    mine, other = bearer(KEYS[0]), bearer(KEYS[1])
    batch = await daemon.create(line("a"), headers=mine)
    await daemon.ended(batch, **mine)
    path = f"/v1/batches/{batch['id']}"
    for answer in (
        await daemon.client.get(path, headers=other),
        await daemon.client.post(f"{path}/cancel", headers=other),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert (await daemon.client.get("/v1/batches", headers=other)).json()["data"] == []
    assert (await daemon.client.get(path)).status_code == 401
    file_id = await daemon.upload(line("a"), **mine)
    body = {"input_file_id": file_id, "endpoint": ROUTE, "completion_window": "24h"}
    answer = await daemon.client.post("/v1/batches", json=body, headers=other)
    assert answer.json()["error"]["param"] == "input_file_id"


async def test_key_has_bounded_number_of_batches(start: Start, engine: ScriptedEngine) -> None:
    daemon = start(structs.replace(FAST, max_batches_per_key=2))
    script, engine.script = engine.script, (asyncio.Event(),)
    batches = [await daemon.create(line("a")) for _ in range(2)]
    file_id = await daemon.upload(line("a"))
    body = {"input_file_id": file_id, "endpoint": ROUTE, "completion_window": "24h"}
    answer = await daemon.client.post("/v1/batches", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    await daemon.client.post(f"/v1/batches/{batches[0]['id']}/cancel")
    await daemon.ended(batches[0])
    engine.script = script
    newest = await daemon.create(line("a"))
    listed = (await daemon.client.get("/v1/batches")).json()["data"]
    assert [each["id"] for each in listed] == [newest["id"], batches[1]["id"]]


async def test_batches_can_be_turned_off(start: Start) -> None:
    daemon = start(structs.replace(FAST, max_running=0))
    answer = await daemon.client.get("/v1/batches")
    assert (answer.status_code, answer.json()["error"]["code"]) == (501, "not_supported")
