"""Bodies, queue slots and disconnects, on real sockets where it matters."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.unit.api.conftest import Connect, listening
from tests.unit.api.requests import ROUTE, chat, image_part, text, user
from tests.unit.api.scripted_engine import HELLO, ScriptedEngine, ended, failed, finished, never
from tests.unit.api.scripted_engine import text as says
from vlm_server.settings import Limits, Server, Settings

SMALL = Settings(limits=Limits(max_body_bytes=2048, body_timeout_seconds=0.3))


@pytest.mark.parametrize(
    "content_type",
    ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data",
     "application/jsonx"],
)  # fmt: skip
async def test_content_types_other_than_json_are_415(
    client: httpx.AsyncClient, content_type: str
) -> None:
    answer = await client.post(
        ROUTE, content=json.dumps(chat()), headers={"content-type": content_type}
    )
    assert answer.status_code == 415
    assert answer.json()["error"]["code"] == "unsupported_media_type"


async def test_json_with_charset_is_accepted(client: httpx.AsyncClient) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8", "content-encoding": "identity"}
    answer = await client.post(ROUTE, content=json.dumps(chat()), headers=headers)
    assert answer.status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "br", "gzip, identity"])
async def test_compressed_bodies_are_415(client: httpx.AsyncClient, encoding: str) -> None:
    answer = await client.post(ROUTE, json=chat(), headers={"content-encoding": encoding})
    assert answer.status_code == 415


def padded(size: int) -> bytes:
    """A good request of exactly `size` bytes."""
    body = json.dumps(chat()).encode()
    return body + b" " * (size - len(body))


async def chunked(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), 500):
        yield content[start : start + 500]


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_body_limit_is_exact(is_chunked: bool) -> None:
    engine = ScriptedEngine()
    async with listening(engine, SMALL) as port, httpx.AsyncClient() as client:
        for size, status in ((2048, 200), (2049, 413), (1 << 20, 413), (2048, 200)):
            content = chunked(padded(size)) if is_chunked else padded(size)
            answer = await client.post(
                f"http://127.0.0.1:{port}{ROUTE}",
                content=content,
                headers={"content-type": "application/json"},
            )
            assert answer.status_code == status, answer.text
            if status == 413:
                assert answer.json()["error"]["code"] == "payload_too_large"
    assert len(engine.submitted) == 2


class Raw:
    """A client that writes arbitrary bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, body: bytes, *headers: str) -> None:
        head = [f"POST {ROUTE} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        self.writer.write("\r\n".join([*head, *headers, "", ""]).encode() + body)

    def ask(self, **fields: Any) -> None:
        body = json.dumps(chat(user(text(), image_part()), **fields)).encode()
        self.send(body, f"Content-Length: {len(body)}")

    async def status(self) -> int:
        line = await asyncio.wait_for(self.reader.readline(), 5)
        return int(line.split()[1])

    async def until(self, end: bytes) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(end), 5)

    async def everything(self) -> bytes:
        """All bytes until the connection ends or is reset."""
        received = b""
        with contextlib.suppress(ConnectionError):
            while piece := await asyncio.wait_for(self.reader.read(1 << 20), 5):
                received += piece
        return received

    def reset(self) -> None:
        self.writer.transport.abort()


@asynccontextmanager
async def raw(port: int) -> AsyncIterator[Raw]:
    client = Raw(*await asyncio.open_connection("127.0.0.1", port))
    try:
        yield client
    finally:
        client.writer.transport.abort()


@asynccontextmanager
async def one_place(engine: ScriptedEngine) -> AsyncIterator[int]:
    """A server with one queue slot, which must be free at the end."""
    limits = Limits(max_requests=1, body_timeout_seconds=0.3)
    async with listening(engine, Settings(limits=limits)) as port:
        yield port
        engine.script = HELLO
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            for _ in range(100):
                status = (await client.get("/v1/status")).json()
                if status["requests"]["in_flight"] == 0:
                    break
                await asyncio.sleep(0.01)
            assert (await client.post(ROUTE, json=chat())).status_code == 200


async def test_body_limit_holds_despite_wrong_content_length() -> None:
    async with listening(ScriptedEngine(), SMALL) as port, raw(port) as client:
        client.send(b"{}", "Content-Length: 999999999999999999999999")
        assert await client.status() in (400, 413)


async def test_oversized_declared_body_is_refused_before_arrival() -> None:
    async with listening(ScriptedEngine(), SMALL) as port, raw(port) as client:
        client.send(b"{", "Content-Length: 100000000")
        assert await client.status() == 413


async def test_slow_body_is_408_and_frees_its_slot() -> None:
    async with one_place(ScriptedEngine()) as port, raw(port) as client:
        client.send(b'{"model"', "Content-Length: 1000")
        assert await client.status() == 408
        head = await client.until(b"\r\n\r\n")
        assert b"connection: close" in head.lower()
        assert b"request_timeout" in await asyncio.wait_for(client.reader.read(), 5)


async def test_disconnect_during_upload_frees_its_slot(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "vlm_server.api")
    engine = ScriptedEngine()
    async with one_place(engine) as port, raw(port) as client:
        client.send(b'{"model"', "Content-Length: 1000")
        await asyncio.sleep(0.05)
        client.reset()
        await asyncio.sleep(0.05)
        assert engine.submitted == []
        assert "status=499" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leave", ["reset", "half-close"])
async def test_disconnect_before_first_token_aborts_request(stream: bool, leave: str) -> None:
    engine = ScriptedEngine(never())
    async with one_place(engine) as port, raw(port) as client:
        client.ask(stream=stream)
        await asyncio.wait_for(engine.waiting.wait(), 5)
        if leave == "reset":
            client.reset()
        else:
            client.writer.write_eof()
        await asyncio.wait_for(engine.closed.wait(), 1)
        assert engine.aborted == [engine.submitted[0].request_id]


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_during_answer_aborts_request(stream: bool) -> None:
    engine = ScriptedEngine(says("one"), says("two"), never())
    async with one_place(engine) as port, raw(port) as client:
        client.ask(stream=stream)
        if stream:
            await client.until(b"two")
        await asyncio.wait_for(engine.waiting.wait(), 5)
        client.reset()
        await asyncio.wait_for(engine.closed.wait(), 1)
        assert engine.aborted == [engine.submitted[0].request_id]


async def test_disconnect_of_non_reading_client_aborts_request() -> None:
    """The answer is buffered and the engine continues until the disconnect."""
    engine = ScriptedEngine(*[says("x" * 100_000)] * 60, never())
    async with one_place(engine) as port, raw(port) as client:
        client.ask(stream=True)
        await client.until(b"xxx")
        await asyncio.sleep(0.1)
        assert not engine.closed.is_set()
        client.reset()
        await asyncio.wait_for(engine.closed.wait(), 1)
        assert len(engine.aborted) == 1


async def test_client_with_too_many_unread_bytes_is_disconnected() -> None:
    engine = ScriptedEngine(*[says("x" * 100_000)] * 1000, never())
    async with one_place(engine) as port, raw(port) as client:
        client.ask(stream=True)
        await client.until(b"xxx")
        await asyncio.wait_for(engine.closed.wait(), 5)
        assert len(engine.aborted) == 1


async def test_whole_answer_may_exceed_unread_limit() -> None:
    engine = ScriptedEngine(*[says("x" * 1_000_000)] * 12, ended(), finished())
    async with listening(engine) as port, httpx.AsyncClient() as client:
        answer = await client.post(f"http://127.0.0.1:{port}{ROUTE}", json=chat())
        assert len(answer.json()["choices"][0]["message"]["content"]) == 12_000_000


async def test_client_that_stops_reading_is_disconnected() -> None:
    """The engine is done and the slot is free; only the connection is left."""
    engine = ScriptedEngine(*[says("x" * 100_000)] * 60, ended(), finished())
    settings = Settings(limits=Limits(unread_timeout_seconds=0.3))
    async with listening(engine, settings) as port, raw(port) as client:
        client.writer.transport.pause_reading()
        client.ask(stream=True)
        await asyncio.wait_for(engine.closed.wait(), 5)
        assert engine.aborted == []
        await asyncio.sleep(1)
        client.writer.transport.resume_reading()
        assert b"[DONE]" not in await client.everything()


async def test_slowly_reading_client_gets_its_whole_answer() -> None:
    engine = ScriptedEngine(*[says("x" * 100_000)] * 60, ended(), finished())
    settings = Settings(limits=Limits(unread_timeout_seconds=0.3))
    async with listening(engine, settings) as port, raw(port) as client:
        client.ask(stream=True)
        received = b""
        while b"[DONE]" not in received[-100:]:
            received += await asyncio.wait_for(client.reader.read(200_000), 5)
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("size", [1000, 100_000])
async def test_small_refused_body_is_read_and_connection_kept(size: int) -> None:
    async with listening(ScriptedEngine()) as port, raw(port) as client:
        client.send(b"", f"Content-Length: {size}", "Origin: http://evil.example")
        assert await client.status() == 403
        head = await client.until(b"\r\n\r\n")
        assert (b"connection: close" in head) == (size > 65536)
        if size < 65536:
            client.writer.write(b"x" * size + b"\r\n")
            client.ask()
            await client.until(b"Hello world")
        else:
            await asyncio.wait_for(client.reader.read(), 5)


async def test_engine_error_after_keepalive_comment_is_event() -> None:
    release = asyncio.Event()
    engine = ScriptedEngine(release, failed("out_of_memory", "Memory ran out."))
    settings = Settings(server=Server(stream_keepalive_seconds=0.1))
    async with listening(engine, settings) as port, raw(port) as client:
        client.ask(stream=True)
        assert await client.status() == 200
        await client.until(b": keep-alive\n\n")
        release.set()
        assert b'"code":"out_of_memory"' in await client.until(b"\r\n0\r\n\r\n")


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with listening(ScriptedEngine()) as port, raw(port) as client:
        live = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
        missing = live.replace(b"live", b"dead")
        client.writer.write((live + b"\r\n" + missing) * 50)
        for _ in range(50):
            assert await client.status() == 200
            await client.until(b'{"status":"live"}')
            assert await client.status() == 404
            await client.until(b"}}")


@pytest.mark.parametrize(
    ("request_line", "header", "status", "stays_open"),
    [
        ("GET /health/live HTTP/1.1", "Connection: close", 200, False),
        ("GET /health/live HTTP/1.0", "Connection: keep-alive", 200, False),
        ("HEAD /health/live HTTP/1.1", "Accept: */*", 200, True),
        ("GET /health/live HTTP/1.1", "Connection: Upgrade\r\nUpgrade: websocket", 200, True),
        ("GET /health/live HTTP/1.1", "Content-Length: 5\r\n\r\nhello", 200, True),
        ("CONNECT localhost:80 HTTP/1.1", "Accept: */*", 404, True),
        ("OPTIONS * HTTP/1.1", "Accept: */*", 404, True),
    ],
)
async def test_unusual_http_requests_have_their_status(
    request_line: str, header: str, status: int, stays_open: bool
) -> None:
    async with listening(ScriptedEngine()) as port, raw(port) as client:
        tail = "" if "\r\n\r\n" in header else "\r\n\r\n"
        client.writer.write(f"{request_line}\r\nHost: localhost\r\n{header}{tail}".encode())
        assert await client.status() == status
        head = await client.until(b"\r\n\r\n")
        assert (b"connection: close" in head.lower()) != stays_open
        if stays_open:
            if not request_line.startswith("HEAD"):
                await client.until(b"}" if status == 200 else b"}}")
            client.ask()
            await client.until(b"Hello world")
        else:
            assert await client.everything() == b'{"status":"live"}'


async def test_connection_over_limit_gets_queue_full() -> None:
    engine = ScriptedEngine(never())
    settings = Settings(server=Server(max_connections=1))
    async with listening(engine, settings) as port, raw(port) as client:
        client.ask()
        await asyncio.wait_for(engine.waiting.wait(), 5)
        async with raw(port) as other:
            assert b'"code":"queue_full"' in await other.everything()
        assert not engine.closed.is_set()


async def test_expect_continue_is_answered_when_body_is_read() -> None:
    async with listening(ScriptedEngine(), SMALL) as port, raw(port) as client:
        body = json.dumps(chat()).encode()
        client.send(b"", f"Content-Length: {len(body)}", "Expect: 100-continue")
        assert await client.status() == 100
        client.writer.write(body)
        await client.until(b'"rejected_prediction_tokens":0}}}')
        client.send(b"", "Content-Length: 5000", "Expect: 100-continue")
        assert await client.status() == 413
        assert b"connection: close" in await client.until(b"\r\n\r\n")


async def test_first_token_is_sent_at_once() -> None:
    engine = ScriptedEngine(says("one"), never())
    async with listening(engine) as port, raw(port) as client:
        client.ask(stream=True)
        assert b'"role":"assistant"' in await client.until(b"one")


async def test_second_request_waits_for_first_on_its_connection() -> None:
    engine = ScriptedEngine()
    async with listening(engine) as port, raw(port) as client:
        client.ask()
        client.ask(stream=True)
        await client.until(b"Hello world")
        await client.until(b"[DONE]")
        assert engine.aborted == []


async def test_full_queue_is_429_before_images_are_parsed(
    connect: Connect, engine: ScriptedEngine
) -> None:
    release = asyncio.Event()
    engine.script = (release, *HELLO)
    client = connect(Settings(limits=Limits(max_requests=2)))
    running = [asyncio.create_task(client.post(ROUTE, json=chat())) for _ in range(2)]
    while len(engine.submitted) < 2:  # noqa: ASYNC110  the engine is only a script
        await asyncio.sleep(0.001)
    answer = await client.post(ROUTE, json=chat(user(image_part("data:image/png;base64,!!!!"))))
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["error"]["code"] == "queue_full"
    assert (await client.get("/v1/status")).json()["requests"]["in_flight"] == 2
    release.set()
    assert [answer.status_code for answer in await asyncio.gather(*running)] == [200, 200]
    assert (await client.post(ROUTE, json=chat())).status_code == 200


async def test_refused_requests_free_their_slots(connect: Connect, engine: ScriptedEngine) -> None:
    client = connect(Settings(limits=Limits(max_requests=1, max_body_bytes=2048)))
    bad: list[dict[str, Any]] = [
        chat(foo=1),
        chat(user(image_part("nonsense"))),
        {**chat(), "model": "other"},
        chat(user("x" * 3000)),
    ]
    for body in bad:
        assert 400 <= (await client.post(ROUTE, json=body)).status_code < 500
    for script in ((), (says("a"), finished(is_aborted=True))):
        engine.script = script
        await client.post(ROUTE, json=chat(stream=True))
    engine.script = HELLO
    assert (await client.post(ROUTE, json=chat())).status_code == 200
    assert engine.aborted == []


async def test_cancelled_server_task_aborts_request(
    connect: Connect, engine: ScriptedEngine
) -> None:
    engine.script = (never(),)
    client = connect(Settings(limits=Limits(max_requests=1)))
    task = asyncio.create_task(client.post(ROUTE, json=chat()))
    await asyncio.wait_for(engine.waiting.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(engine.aborted) == 1
    engine.script = HELLO
    assert (await client.post(ROUTE, json=chat())).status_code == 200
