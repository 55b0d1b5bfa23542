"""Turns near and over the limits, turns parsed in a process, and the store's paging."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.unit.api.conftest import Connect
from tests.unit.api.dialects.responses.requests import ROUTE, asking
from tests.unit.api.dialects.responses.test_open_responses import events
from tests.unit.api.requests import PNG_URL, user
from tests.unit.api.scripted_engine import (
    HELLO,
    ScriptedEngine,
    calls,
    ended,
    ends_with,
    failed,
    finished,
    never,
    text,
)
from vlm_server.api.parsing.json_body import SMALL_BYTES
from vlm_server.protocol import Message, TextPart
from vlm_server.settings import Limits, Server, Settings

LONG = "x" * (SMALL_BYTES + 1)


async def create(client: httpx.AsyncClient, input: Any, **fields: Any) -> dict[str, Any]:
    answer = await client.post(ROUTE, json=asking(input, **fields))
    assert answer.status_code == 200, answer.text
    decoded: dict[str, Any] = answer.json()
    return decoded


async def test_short_turn_continues_long_one(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    first = await create(client, LONG)
    second = await create(client, "And?", previous_response_id=first["id"])
    await create(client, LONG, previous_response_id=second["id"])
    sizes = [[len(m.content[0].text) for m in submit.messages] for submit in engine.submitted]  # type: ignore[union-attr]
    hello = len("Hello world")
    assert sizes == [
        [len(LONG)],
        [len(LONG), hello, 4],
        [len(LONG), hello, 4, hello, len(LONG)],
    ]


async def test_image_with_unknown_previous_response_is_refused(
    client: httpx.AsyncClient,
) -> None:
    image = {"type": "input_image", "image_url": PNG_URL}
    body = asking([user(image)], previous_response_id="resp_nothing")
    answer = await client.post(ROUTE, json=body)
    assert answer.json()["error"]["code"] == "previous_response_not_found"


async def test_total_bytes_of_all_turns_are_bounded(
    connect: Connect, engine: ScriptedEngine
) -> None:
    client = connect(Settings(limits=Limits(max_body_bytes=4096)))
    first = await create(client, "x" * 3000)
    body = asking("x" * 1000, previous_response_id=first["id"])
    answer = await client.post(ROUTE, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")
    assert answer.json()["error"]["param"] == "previous_response_id"
    await create(client, "x" * 100, previous_response_id=first["id"])


async def test_message_limits_count_all_turns(connect: Connect) -> None:
    client = connect(Settings(limits=Limits(max_images=2)))
    images = [{"type": "input_image", "image_url": PNG_URL}] * 2
    first = await create(client, [user(*images)])
    more = asking([user(*images[:1])], previous_response_id=first["id"])
    answer = await client.post(ROUTE, json=more)
    assert answer.json()["error"]["message"] == "At most 2 images are allowed (limits.max_images)."


async def test_response_reports_store_false_without_store(connect: Connect) -> None:
    client = connect(Settings(server=Server(max_responses_bytes=0)))
    response = await create(client, "Hi", store=True)
    assert response["store"] is False
    assert (await client.get(f"{ROUTE}/{response['id']}")).status_code == 404


async def test_stored_response_cannot_be_streamed_again(client: httpx.AsyncClient) -> None:
    response = await create(client, "Hi")
    answer = await client.get(f"{ROUTE}/{response['id']}", params={"stream": "true"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")


async def test_response_error_after_keep_alives_is_complete_stream(
    connect: Connect, engine: ScriptedEngine
) -> None:
    client = connect(Settings(server=Server(stream_keepalive_seconds=0.01)))
    engine.script = (never(), failed("engine_died", "The engine ended."))
    pending = asyncio.create_task(client.post(ROUTE, json=asking(stream=True)))
    await engine.waiting.wait()
    await asyncio.sleep(0.1)
    (waited, _) = engine.script
    assert isinstance(waited, asyncio.Event)
    waited.set()
    answer = await pending
    assert answer.status_code == 200
    assert answer.text.startswith(": keep-alive\n\n")
    lines = [line for line in answer.text.splitlines() if line.startswith("event: ")]
    assert lines == [
        "event: response.created",
        "event: response.in_progress",
        "event: response.failed",
        "event: error",
    ]


async def test_held_back_text_precedes_error(connect: Connect, engine: ScriptedEngine) -> None:
    """The answer ends with its first text, after keep-alives, and then fails."""
    client = connect(Settings(server=Server(stream_keepalive_seconds=0.01)))
    engine.script = (never(), ends_with("Hello"), failed("engine_died", "The engine ended."))
    pending = asyncio.create_task(client.post(ROUTE, json=asking(stream=True)))
    await engine.waiting.wait()
    await asyncio.sleep(0.1)
    (waited, *_) = engine.script
    assert isinstance(waited, asyncio.Event)
    waited.set()
    stream = events((await pending).text.replace(": keep-alive\n\n", ""))
    assert [event["type"].removeprefix("response.") for event in stream] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        *("failed", "error"),
    ]


async def test_failed_response_has_output_so_far(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (
        text("I click."),
        calls(0, id="c", name="click"),
        calls(0, '{"x": '),
        failed("engine_died", "The engine ended."),
    )
    stream = events((await client.post(ROUTE, json=asking(stream=True))).text)
    *_, arguments, item, whole, error = stream
    assert arguments["type"] == "response.function_call_arguments.done"
    assert item["type"] == "response.output_item.done"
    assert item["item"]["status"] == "incomplete"
    output = whole["response"]["output"]
    assert [each["status"] for each in output] == ["completed", "incomplete"]
    assert output[1]["arguments"] == '{"x": '
    assert not whole["response"]["store"]
    assert error["error"] == {
        "type": "server_error",
        **{name: error[name] for name in ("code", "message", "param")},
    }


async def test_response_too_large_to_store_reports_store_false(
    connect: Connect, engine: ScriptedEngine
) -> None:
    client = connect(Settings(server=Server(max_responses_bytes=20000)))
    engine.script = (text("z" * 30000), ended(), finished())
    response = await create(client, "Hi")
    assert response["store"] is False
    assert (await client.get(f"{ROUTE}/{response['id']}")).status_code == 404
    stream = events((await client.post(ROUTE, json=asking(stream=True))).text)
    assert stream[-1]["response"]["store"] is False


async def test_truncated_call_of_response_can_be_continued(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (calls(0, '{"x": ', id="c", name="a"), ended("length"), finished())
    first = await create(client, "U")
    assert first["output"][0]["status"] == "incomplete"
    engine.script = HELLO
    result = {"type": "function_call_output", "call_id": "c", "output": "R"}
    for given in ([result], "Go on."):
        await create(client, given, previous_response_id=first["id"])
        (call,) = engine.submitted[-1].messages[1].tool_calls
        assert call.arguments == '{"arguments": "{\\"x\\": "}'


async def test_stored_responses_are_measured_and_expire(connect: Connect) -> None:
    client = connect(Settings(server=Server(max_responses_bytes=10000, responses_keep_seconds=0.3)))
    for _ in range(3):
        await create(client, "x" * 2000)
    name = "vlm_server_stored_responses"
    shown = await metrics(client)
    assert shown[f"{name}_limit_bytes"] == 10000
    assert 2000 < shown[f"{name}_size_bytes"] <= 10000
    assert shown[f"{name}_evictions_total"] + shown[name] == 3
    assert shown[f"{name}_evictions_total"] > 0
    for _ in range(200):
        if not (await metrics(client))[name]:
            break
        await asyncio.sleep(0.02)
    assert (await metrics(client))[f"{name}_size_bytes"] == 0


async def metrics(client: httpx.AsyncClient) -> dict[str, float]:
    lines = (await client.get("/metrics")).text.splitlines()
    pairs = (line.split() for line in lines if "{" not in line and line[0] != "#")
    return {name: float(value) for name, value in pairs}


async def test_input_items_are_listed_in_pages(client: httpx.AsyncClient) -> None:
    response = await create(client, [user(str(i)) for i in range(5)])
    route = f"{ROUTE}/{response['id']}/input_items"
    first = (await client.get(route, params={"limit": 2})).json()
    texts = [item["content"][0]["text"] for item in first["data"]]
    assert (texts, first["has_more"]) == (["4", "3"], True)
    assert first["last_id"] == first["data"][-1]["id"]
    rest = (await client.get(route, params={"after": first["last_id"]})).json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["2", "1", "0"]
    assert not rest["has_more"]


async def test_wrong_paging_parameters_are_refused_by_name(client: httpx.AsyncClient) -> None:
    response = await create(client, "Hi")
    route = f"{ROUTE}/{response['id']}/input_items"
    for wrong in (
        {"limit": 0},
        {"limit": "x"},
        {"limit": "0" * 8 + "101"},
        {"limit": "1" * 5000},
        {"order": "up"},
        {"after": "no"},
    ):
        answer = await client.get(route, params=wrong)
        assert (answer.status_code, [answer.json()["error"]["param"]]) == (400, list(wrong))


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_paging_with_repeated_item_ids_ends(client: httpx.AsyncClient, order: str) -> None:
    same = {"id": "same", **user("S")}
    first = await create(client, [same, same, user("U")])
    second = await create(client, "And?", previous_response_id=first["id"])
    route = f"{ROUTE}/{second['id']}/input_items"
    ids: list[str] = []
    more = True
    while more and len(ids) < 10:
        page = {"limit": 1, "order": order} | ({"after": ids[-1]} if ids else {})
        listed = (await client.get(route, params=page)).json()
        ids.append(listed["last_id"])
        more = listed["has_more"]
    assert len(ids) == len(set(ids)) == 5


async def test_paging_after_repeated_item_id_ends(
    client: httpx.AsyncClient,
) -> None:
    same = {"id": "same", **user("S")}
    first = await create(client, [same])
    second = await create(client, [same], previous_response_id=first["id"])
    route = f"{ROUTE}/{second['id']}/input_items"
    page = {"limit": 1, "order": "asc", "after": "same"}
    assert (await client.get(route, params=page)).json()["data"] == []


async def test_result_without_its_call_reaches_engine(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    """The turn of the call was deleted; the result keeps its place."""
    result = {"type": "function_call_output", "call_id": "c", "output": "R"}
    await create(client, [user("U"), result])
    assert engine.submitted[0].messages[1] == Message(
        "tool", (TextPart("R"),), tool_call_id="c", name=""
    )
