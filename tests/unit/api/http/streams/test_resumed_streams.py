"""Streams that are cut and resumed over real sockets, by `Last-Event-ID`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.waiting import until
from tests.unit.api.conftest import listening
from tests.unit.api.scripted_engine import (
    ScriptedEngine,
    Step,
    ended,
    failed,
    finished,
    never,
    text,
)
from vlm_server.settings import Limits, Server, Settings

SECONDS = 1.5
KEYS = ("correct-horse-battery", "another-horse-battery")
WORDS = tuple(f"word {number} " for number in range(20))
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 99},
    "/v1/responses": {"input": "Hi"},
}
CHAT = "/v1/chat/completions"
RESUMABLE = {"X-VLM-Resumable": "true"}
_ID = re.compile(rb"\nid: (?P<id>\S+)\n\n")


def answer_of(*steps: Step) -> tuple[Step, ...]:
    return (*steps, ended(), finished())


@asynccontextmanager
async def connected(
    engine: ScriptedEngine, limits: Limits | None = None, **server: Any
) -> AsyncIterator[httpx.AsyncClient]:
    server = {"stream_resume_keep_seconds": SECONDS, "api_keys": KEYS} | server
    settings = Settings(server=Server(**server), limits=limits or Limits())
    async with (
        listening(engine, settings) as port,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {KEYS[0]}"}
        ) as http,
    ):
        yield http


@pytest.fixture
async def http(engine: ScriptedEngine) -> AsyncIterator[httpx.AsyncClient]:
    engine.script = answer_of(*map(text, WORDS))
    async with connected(engine) as client:
        yield client


async def read(
    http: httpx.AsyncClient, headers: dict[str, str], route: str = CHAT, max_bytes: int = 1 << 30
) -> bytes:
    """The first `max_bytes` of a stream, whose connection is closed then."""
    body = BODIES[route] | {"model": "demo", "stream": True}
    async with http.stream("POST", route, json=body, headers=headers) as response:
        content = b"" if response.status_code == 200 else await response.aread()
        assert response.status_code == 200, content
        async for piece in response.aiter_raw():
            content += piece
            if len(content) >= max_bytes:
                break
    return content[:max_bytes]


def whole_events(content: bytes) -> bytes:
    """`content` up to its last complete event, as a client has it after a cut."""
    return content[: content.rfind(b"\n\n") + 2] if b"\n\n" in content else b""


def last_id(content: bytes) -> str:
    return _ID.findall(content)[-1].decode()


def without_comments(content: bytes) -> bytes:
    return re.sub(rb"^:.*\n", b"", content, flags=re.MULTILINE)


async def refused(http: httpx.AsyncClient, last_event_id: str, route: str = CHAT) -> int:
    headers = {"Last-Event-ID": last_event_id}
    answer = await http.post(route, json=BODIES[route], headers=headers)
    assert answer.json()["error"]["type"] == "invalid_request_error" or route == "/v1/messages"
    return answer.status_code


async def gauge(http: httpx.AsyncClient, name: str) -> float:
    page = (await http.get("/metrics")).text
    families = text_string_to_metric_families(page)
    samples = (sample for family in families for sample in family.samples)
    return next(sample.value for sample in samples if sample.name == f"vlm_server_{name}")


async def until_empty(http: httpx.AsyncClient) -> None:
    """Wait until no log, byte or queue slot is in use."""
    names = ("resumable_streams", "resumable_streams_size_bytes", "requests_in_flight")
    for _ in range(500):
        values = [await gauge(http, name) for name in names]
        if not any(values):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(values)


@pytest.mark.parametrize("route", BODIES)
async def test_stream_cut_at_any_byte_resumes_without_loss(
    http: httpx.AsyncClient, route: str
) -> None:
    content = await read(http, RESUMABLE, route)
    events = content.split(b"\n\n")[:-1]
    assert [event.rpartition(b":")[2] for event in events] == [
        b"%d" % number for number in range(len(events))
    ]
    for cut in range(len(events[0]) + 2, len(content), 97):
        before = whole_events(content[:cut])
        after = await read(http, {"Last-Event-ID": last_id(before)}, route)
        assert before + without_comments(after) == content


async def test_stream_cut_in_first_event_resumes_from_its_request_id(
    http: httpx.AsyncClient,
) -> None:
    content = await read(http, RESUMABLE)
    stream_id = last_id(content).partition(":")[0]
    assert without_comments(await read(http, {"Last-Event-ID": stream_id})) == content


async def test_cut_stream_goes_on_without_client(
    http: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    gate = asyncio.Event()
    engine.script = answer_of(text("one "), gate, text("two"))
    before = whole_events(await read(http, RESUMABLE, max_bytes=300))
    await engine.waiting.wait()
    following = asyncio.create_task(read(http, {"Last-Event-ID": last_id(before)}))
    await asyncio.sleep(2 * SECONDS)  # a reader keeps it, however long
    assert not engine.aborted
    gate.set()
    after = await following
    assert (b"two" in after, after.count(b"[DONE]")) == (True, 1)
    await until_empty(http)


async def test_abandoned_stream_is_aborted_after_its_time(
    http: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (text("one "), never())
    before = await read(http, RESUMABLE, max_bytes=300)
    await asyncio.sleep(SECONDS / 2)
    assert not engine.aborted
    await asyncio.wait_for(engine.closed.wait(), 2 * SECONDS)
    assert await refused(http, last_id(before)) == 404
    assert await gauge(http, "abandoned_streams_total") == 1
    await until_empty(http)


async def test_plain_stream_is_aborted_at_once(
    http: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (text("one "), never())
    content = await read(http, {}, max_bytes=10)
    await asyncio.wait_for(engine.closed.wait(), SECONDS / 2)
    assert b"id:" not in content


async def test_resumable_stream_without_bytes_is_aborted_at_once(
    http: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    """Its client has no id to resume it with."""
    engine.script = (never(),)
    reading = asyncio.create_task(read(http, RESUMABLE))
    await engine.waiting.wait()
    reading.cancel()
    await asyncio.wait_for(engine.closed.wait(), SECONDS / 2)
    await until_empty(http)


async def test_error_before_first_event_of_resumable_stream_has_its_status(
    http: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (failed("context_length_exceeded", "Too long."),)
    body = BODIES[CHAT] | {"model": "demo", "stream": True}
    answer = await http.post(CHAT, json=body, headers=RESUMABLE)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    await until_empty(http)


async def test_crash_ends_kept_stream_with_its_error(
    http: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    gate = asyncio.Event()
    engine.script = (text("one "), gate, failed("engine_died", "The engine ended."))
    before = whole_events(await read(http, RESUMABLE, max_bytes=300))
    gate.set()
    for _ in range(2):
        after = await read(http, {"Last-Event-ID": last_id(before)})
        assert after.count(b'"code":"engine_died"') == 1
        assert b"[DONE]" not in after


async def test_silent_stream_tells_its_id_with_first_sign_of_life(engine: ScriptedEngine) -> None:
    """A cut before the first token is resumed by the request's id; comments have no blank line."""
    gate = asyncio.Event()
    engine.script = (gate, *answer_of(text("one")))
    async with connected(engine, stream_keepalive_seconds=0.05) as http:
        body = BODIES[CHAT] | {"model": "demo", "stream": True}
        async with http.stream("POST", CHAT, json=body, headers=RESUMABLE) as response:
            assert await anext(response.aiter_raw()) == b": keep-alive\n"
            stream_id = response.headers["X-Request-Id"]
        following = asyncio.create_task(read(http, {"Last-Event-ID": stream_id}))
        await asyncio.sleep(0.2)
        gate.set()
        content = await following
    assert content.startswith(b": resumed\n: keep-alive\n")
    assert content.count(b"[DONE]") == 1


async def test_official_clients_read_resumable_streams_with_comments(
    engine: ScriptedEngine,
) -> None:
    """They take a comment and a blank line after an `id` for an event without data."""

    async def pause(gate: asyncio.Event) -> None:
        await asyncio.sleep(0.2)
        gate.set()

    async with connected(engine, stream_keepalive_seconds=0.03) as http:
        fields: Any = {
            "model": "demo",
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 9,
            "stream": True,
            "extra_headers": RESUMABLE,
        }
        url = str(http.base_url)
        texts = []
        for name in ("openai", "anthropic"):
            gate = asyncio.Event()
            engine.script = answer_of(text("one "), gate, text("two"))
            pausing = asyncio.create_task(pause(gate))
            if name == "openai":
                async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEYS[0]) as client:
                    chunks = [
                        chunk async for chunk in await client.chat.completions.create(**fields)
                    ]
                texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
            else:
                async with anthropic.AsyncAnthropic(base_url=url, api_key=KEYS[0]) as other:
                    events = [event async for event in await other.messages.create(**fields)]
                texts.append(
                    "".join(e.delta.text for e in events if e.type == "content_block_delta")
                )
            await pausing
    assert texts == ["one two"] * 2


# ---- refusals --------------------------------------------------------------------------


async def test_stream_of_other_key_dialect_or_number_is_refused(http: httpx.AsyncClient) -> None:
    event_id = last_id(await read(http, RESUMABLE))
    stream_id, number = event_id.split(":")
    assert await refused(http, event_id, "/v1/messages") == 404
    assert await refused(http, f"{'0' * 32}:1") == 404
    assert await refused(http, f"{stream_id}:{int(number) + 1}") == 400
    for wrong in ("-1", "x", f"{stream_id}:-1", f"{stream_id}:", f"{stream_id}:{'9' * 40}"):
        assert await refused(http, wrong) == 400
    http.headers["Authorization"] = f"Bearer {KEYS[1]}"
    assert await refused(http, event_id) == 404


async def test_wrong_resumable_header_is_refused(http: httpx.AsyncClient) -> None:
    body = BODIES[CHAT] | {"model": "demo", "stream": True}
    answer = await http.post(CHAT, json=body, headers={"X-VLM-Resumable": "yes"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-VLM-Resumable")


async def test_without_room_streams_are_plain(engine: ScriptedEngine) -> None:
    engine.script = (text("one "), never())
    async with connected(engine, max_stream_resume_bytes=0) as http:
        assert b"id:" not in await read(http, RESUMABLE, max_bytes=10)
        await asyncio.wait_for(engine.closed.wait(), SECONDS / 2)


# ---- bounds ----------------------------------------------------------------------------


async def test_kept_events_are_bounded(engine: ScriptedEngine) -> None:
    engine.script = answer_of(*map(text, WORDS * 20))
    async with connected(engine, max_stream_resume_bytes_per_key=20_000) as http:
        content = await read(http, RESUMABLE)
        assert content.count(b"[DONE]") == 1  # who reads on loses nothing
        assert 0 < await gauge(http, "resumable_streams_size_bytes") <= 20_000
        stream_id, number = last_id(content).split(":")
        assert await refused(http, stream_id) == 404
        after = await read(http, {"Last-Event-ID": f"{stream_id}:{int(number) - 2}"})
        assert content.endswith(without_comments(after))


async def test_fifth_reader_takes_place_of_oldest(
    http: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    gate = asyncio.Event()
    engine.script = answer_of(text("one "), gate, text("two"))
    readers = [asyncio.create_task(read(http, RESUMABLE))]
    await engine.waiting.wait()
    async with http.stream(
        "POST", CHAT, json=BODIES[CHAT] | {"stream": True}, headers=RESUMABLE
    ) as response:
        stream_id = response.headers["X-Request-Id"]
        resumed = {"Last-Event-ID": stream_id}
        readers += [asyncio.create_task(read(http, resumed)) for _ in range(4)]
        assert b"[DONE]" not in await response.aread()
    gate.set()
    contents = await asyncio.gather(*readers)
    assert [content.count(b"[DONE]") for content in contents] == [1] * 5


async def test_many_abandoned_streams_leave_slots_to_others(engine: ScriptedEngine) -> None:
    """A quarter of the slots may wait for clients; the first that left is given up."""
    engine.script = (text("one "), never())
    async with connected(engine, Limits(max_requests=8), stream_resume_keep_seconds=60) as http:
        for _ in range(20):
            await read(http, RESUMABLE, max_bytes=10)
        await until(lambda: len(engine.aborted) == 18, 5)
        assert await gauge(http, "requests_in_flight") == 2
        assert await gauge(http, "abandoned_streams_total") == 18


async def test_key_with_all_slots_taken_may_resume(engine: ScriptedEngine, tmp_path: Any) -> None:
    gate = asyncio.Event()
    engine.script = answer_of(text("one "), gate, text("two"))
    file = tmp_path / "keys"
    file.touch(mode=0o600)
    file.write_text(f'[laptop]\nkey = "{KEYS[0]}"\nmax_requests = 1\n')
    async with connected(engine, api_keys=(), api_key_file=str(file)) as http:
        before = whole_events(await read(http, RESUMABLE, max_bytes=300))
        following = asyncio.create_task(read(http, {"Last-Event-ID": last_id(before)}))
        await asyncio.sleep(0.1)
        body = BODIES[CHAT] | {"model": "demo"}
        assert (await http.post(CHAT, json=body)).json()["error"]["code"] == "key_limit_reached"
        gate.set()
        assert b"two" in await following
