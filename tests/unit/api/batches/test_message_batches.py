"""Message Batches with Anthropic's own client, whose requests a scripted engine answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types.messages import MessageBatch
from msgspec import structs

from tests.support.waiting import until
from tests.unit.api.batches.conftest import FAST, KEYS, Daemon, Start
from tests.unit.api.requests import bearer
from tests.unit.api.scripted_engine import HELLO, ScriptedEngine
from vlm_server.api.batches import split_process
from vlm_server.errors import RequestError
from vlm_server.settings import Server

PATH = "/v1/messages/batches"


def request(name: str, **fields: Any) -> Any:
    message = {"role": "user", "content": f"say {name}"}
    params = {"model": "demo", "max_tokens": 9, "messages": [message], **fields}
    return {"custom_id": name, "params": params}


def client_of(daemon: Daemon, key: str = "none") -> anthropic.AsyncAnthropic:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(daemon.app))
    url = str(daemon.client.base_url)
    return anthropic.AsyncAnthropic(api_key=key, base_url=url, http_client=http, max_retries=0)


async def ended(client: anthropic.AsyncAnthropic, batch: MessageBatch) -> MessageBatch:
    async with asyncio.timeout(10):
        while batch.processing_status != "ended":
            await asyncio.sleep(0.02)
            batch = await client.messages.batches.retrieve(batch.id)
    return batch


async def results_of(client: anthropic.AsyncAnthropic, batch: MessageBatch) -> dict[str, Any]:
    found = [each async for each in await client.messages.batches.results(batch.id)]
    assert len({each.custom_id for each in found}) == len(found)
    return {each.custom_id: each.result for each in found}


async def test_requests_are_answered_as_alone(start: Start, engine: ScriptedEngine) -> None:
    daemon = start()
    client = client_of(daemon)
    alone = await client.messages.create(**request("a")["params"])
    wanted = [request("a"), request("b", temperature=9), request("c")]
    batch = await client.messages.batches.create(requests=wanted)
    assert (batch.type, batch.request_counts.processing, batch.results_url) == (
        "message_batch",
        3,
        None,
    )
    batch = await ended(client, batch)
    counts = batch.request_counts
    assert (counts.succeeded, counts.errored, counts.processing) == (2, 1, 0)
    found = await results_of(client, batch)
    assert [found[name].type for name in "abc"] == ["succeeded", "errored", "succeeded"]
    assert found["a"].message.content == alone.content
    assert found["a"].message.usage.output_tokens == alone.usage.output_tokens
    assert found["b"].error.error.type == "invalid_request_error"
    assert (await client.messages.batches.list()).data[0].id == batch.id
    listed = (await daemon.client.get("/v1/files?purpose=batch")).json()["data"]
    assert listed == [], "the file that was made of the requests is gone"
    deleted = await client.messages.batches.delete(batch.id)
    assert deleted.type == "message_batch_deleted"
    assert (await daemon.client.get("/v1/files")).json()["data"] == []
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.batches.retrieve(batch.id)


async def test_cancelled_batch_has_result_for_each_request(
    start: Start,
    engine: ScriptedEngine,
) -> None:
    daemon = start(structs.replace(FAST, max_running=1))
    client = client_of(daemon)
    engine.script = (gate := asyncio.Event(), *HELLO)
    batch = await client.messages.batches.create(requests=[request(name) for name in "abc"])
    await until(lambda: engine.submitted)
    with pytest.raises(anthropic.ConflictError):
        await client.messages.batches.delete(batch.id)
    assert (await daemon.client.get(f"{PATH}/{batch.id}/results")).status_code == 409
    engine.script = (asyncio.Event(),)
    gate.set()
    await until(lambda: len(engine.submitted) == 2)
    batch = await client.messages.batches.cancel(batch.id)
    assert batch.processing_status in ("canceling", "ended")
    batch = await ended(client, batch)
    assert (batch.request_counts.succeeded, batch.request_counts.canceled) == (1, 2)
    found = await results_of(client, batch)
    assert [found[name].type for name in "abc"] == ["succeeded", "canceled", "canceled"]
    assert (await client.messages.batches.cancel(batch.id)).processing_status == "ended"


async def test_expired_batch_has_result_for_each_request(
    start: Start,
    engine: ScriptedEngine,
) -> None:
    daemon = start()
    client = client_of(daemon)
    engine.script = (asyncio.Event(),)
    batch = await client.messages.batches.create(requests=[request("a")])
    await until(lambda: engine.submitted)
    store = daemon.lane.begin(daemon.app)
    found = store.find("", batch.id)
    assert found is not None
    store.change(found, expires_at=1)
    batch = await ended(client, batch)
    assert batch.request_counts.expired == 1
    assert (await results_of(client, batch))["a"].type == "expired"


async def test_kinds_of_batches_are_apart_and_keys_do_not_see_each_others(
    start: Start,
    engine: ScriptedEngine,
) -> None:
    daemon = start(server=Server(api_keys=KEYS))
    mine, other = (client_of(daemon, key) for key in KEYS)
    batches = [await mine.messages.batches.create(requests=[request("a")]) for _ in range(3)]
    for batch in batches:
        await ended(mine, batch)
    headers = bearer(KEYS[0])
    assert (await daemon.client.get("/v1/batches", headers=headers)).json()["data"] == []
    path = f"/v1/batches/{batches[0].id}"
    assert (await daemon.client.get(path, headers=headers)).status_code == 404
    for ask in (
        other.messages.batches.retrieve,
        other.messages.batches.cancel,
        other.messages.batches.delete,
        other.messages.batches.results,
    ):
        with pytest.raises(anthropic.NotFoundError):
            await ask(batches[0].id)
    newest = [each.id for each in reversed(batches)]
    page = await mine.messages.batches.list(limit=2)
    assert ([each.id for each in page.data], page.has_more) == (newest[:2], True)
    page = await mine.messages.batches.list(limit=2, after_id=newest[1])
    assert ([each.id for each in page.data], page.has_more) == (newest[2:], False)
    page = await mine.messages.batches.list(limit=1, before_id=newest[2])
    assert ([each.id for each in page.data], page.has_more) == ([newest[1]], True)


async def test_dropped_results_are_missed_by_name(
    start: Start,
    engine: ScriptedEngine,
) -> None:
    daemon = start()
    client = client_of(daemon)
    wanted = [request("a"), request("b", temperature=9)]
    batch = await ended(client, await client.messages.batches.create(requests=wanted))
    files = (await daemon.client.get("/v1/files?purpose=batch_output")).json()["data"]
    errors = next(file for file in files if file["filename"].endswith("errors.jsonl"))
    await daemon.client.delete(f"/v1/files/{errors['id']}")
    with pytest.raises(anthropic.NotFoundError, match="dropped"):
        await client.messages.batches.results(batch.id)


@pytest.mark.parametrize(
    ("requests", "param"),
    [
        ([], "requests"),
        ("x", "requests"),
        ([1], "requests[0]"),
        ([request("a"), request("a")], "requests[1].custom_id"),
        ([request("a b")], "requests[0].custom_id"),
        ([request("a" * 65)], "requests[0].custom_id"),
        ([request("é")], "requests[0].custom_id"),
        ([{"custom_id": "a"}], "requests[0]"),
        ([{"custom_id": "a", "params": [1]}], "requests[0].params"),
        ([request("a", stream=True)], "requests[0].params.stream"),
        ([request("a", system="x" * 2000)], "requests[0].params"),
        ([request(str(i)) for i in range(5)], "requests"),
    ],
)
async def test_wrong_requests_are_refused_at_once(
    start: Start,
    requests: Any,
    param: str,
) -> None:
    daemon = start(structs.replace(FAST, max_line_bytes=1500, max_lines=4))
    answer = await daemon.client.post(PATH, json={"requests": requests})
    assert 400 <= answer.status_code < 500
    assert (answer.json()["type"], answer.json()["error"]["param"]) == ("error", param)
    assert (await daemon.client.get(PATH)).json()["data"] == []
    assert (await daemon.client.get("/v1/files")).json()["data"] == []


async def test_refused_batch_leaves_no_file(start: Start, engine: ScriptedEngine) -> None:
    daemon = start(structs.replace(FAST, max_batches_per_key=1))
    engine.script = (asyncio.Event(),)
    answers = [await daemon.client.post(PATH, json={"requests": [request("a")]}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
    assert len((await daemon.client.get("/v1/files")).json()["data"]) == 1


async def test_body_that_is_no_json_is_refused(start: Start) -> None:
    daemon = start()
    headers = {"Content-Type": "application/json"}
    deep = b'{"requests": [{"custom_id": "a", "params": ' + b"[" * 100_000
    for content in (b"", b"\xff", b"{", b"[]", b'{"requests": [NaN]}', deep):
        answer = await daemon.client.post(PATH, content=content, headers=headers)
        assert (answer.status_code, answer.json()["type"]) == (400, "error"), answer.text


def test_line_has_no_line_ends_of_request() -> None:
    params = json.dumps(request("a")["params"], indent=2).replace("\n", "\r\n")
    body = f'{{"requests": [{{"custom_id": "a", "params": {params}}}]}}'.encode()
    lines = split_process.split(body, 9, 9999).data
    assert lines.count(b"\n") == 1
    assert json.loads(lines)["body"] == request("a")["params"]
    escaped = body.replace(b'"max_tokens"', b'"str\\u0065am": true, "max_tokens"')
    with pytest.raises(RequestError, match="stream"):
        split_process.split(escaped, 9, 9999)
