"""Shutdown of the HTTP server while another process keeps its socket open."""

from __future__ import annotations

import asyncio
import email.utils
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from starlette.types import Receive, Scope, Send

from vlm_server.api.http.connection.server import LAST_CALL_SECONDS, HttpServer
from vlm_server.settings import Settings

pytestmark = pytest.mark.unit

HEADERS = [(b"content-length", b"8")]
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


@dataclass
class Application:
    """A fake application: answers once `may_answer` is set, counts requests in `begun`."""

    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    begun: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun += 1
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await send({"type": "http.response.body", "body": b"answered"})


@dataclass
class Running:
    server: HttpServer
    application: Application
    port: int

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


@asynccontextmanager
async def running(
    listener: socket.socket, application: Application | None = None
) -> AsyncIterator[Running]:
    """A server on a duplicate of `listener`, which stays open."""
    application = application or Application()
    server = HttpServer(application, Settings())
    task = asyncio.create_task(server.serve(sockets=[listener.dup()]))
    while not server.started:  # noqa: ASYNC110  uvicorn offers nothing to wait for
        await asyncio.sleep(0.005)
    try:
        yield Running(server, application, listener.getsockname()[1])
    finally:
        application.may_answer.set()
        server.should_exit = True
        await asyncio.wait_for(task, 10)


@pytest.fixture
def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


async def response(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(5):
        return await reader.readuntil(b"answered")


async def test_tcp_keepalive_finds_lost_clients_within_minutes(
    listener: socket.socket,
) -> None:
    async with running(listener) as run:
        reader, writer = await run.connect()
        writer.write(GET)
        run.application.may_answer.set()
        await response(reader)
        (connection,) = run.server.server_state.connections
        ours = connection._transport.get_extra_info("socket")  # type: ignore[union-attr]
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        silence = getattr(socket, "TCP_KEEPIDLE", getattr(socket, "TCP_KEEPALIVE", None))
        times = [silence, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT]
        assert [ours.getsockopt(socket.IPPROTO_TCP, option) for option in times] == [60, 15, 4]
        writer.close()


@dataclass
class Chatty(Application):
    """Sends many pieces in one turn of the loop, after the client's reset."""

    reset: Callable[[], None] = field(default=lambda: None)
    sent: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        self.reset()
        for _ in range(50):
            await send({"type": "http.response.body", "body": b"piece", "more_body": True})
        self.sent.set()


async def test_pieces_after_clients_reset_are_dropped_without_warnings(
    listener: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    application = Chatty(reset=client.close)
    async with running(listener, application) as run:
        await asyncio.to_thread(client.connect, ("127.0.0.1", run.port))
        client.sendall(GET)
        await asyncio.wait_for(application.sent.wait(), 10)
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def test_response_date_is_current_without_timer(listener: socket.socket) -> None:
    async with running(listener) as run:
        run.application.may_answer.set()
        reader, writer = await run.connect()
        for _ in range(2):
            writer.write(GET)
            head = (await response(reader)).decode()
            line = next(each for each in head.splitlines() if each.startswith("date: "))
            date = email.utils.parsedate_to_datetime(line.removeprefix("date: "))
            assert abs(date.timestamp() - time.time()) < 3
            await asyncio.sleep(1.1)
        writer.close()


async def test_open_connections_get_one_more_answer_before_close(listener: socket.socket) -> None:
    async with running(listener) as run:
        run.application.may_answer.set()
        silent, used = await run.connect(), await run.connect()
        used[1].write(GET)
        assert b"connection: close" not in (await response(used[0])).lower()
        ending = asyncio.create_task(run.server.last_call(lambda: 0))
        await asyncio.sleep(0.1)
        for reader, writer in (silent, used):
            writer.write(GET)
            assert b"connection: close" in (await response(reader)).lower()
            assert await reader.read() == b""
        began = time.monotonic()
        await asyncio.wait_for(ending, 5)
        assert time.monotonic() - began < LAST_CALL_SECONDS, "nobody is left to wait for"


async def test_connection_accepted_during_shutdown_is_answered(listener: socket.socket) -> None:
    async with running(listener) as run:
        run.application.may_answer.set()
        with socket.create_connection(listener.getsockname()) as client:
            client.sendall(GET)
            for _ in range(2):  # it is accepted in the second round, and made a connection later
                await asyncio.sleep(0)
            await run.server.last_call(lambda: 1)
            run.server.should_exit = True
            client.setblocking(False)
            async with asyncio.timeout(5):
                assert b"200 OK" in await asyncio.get_running_loop().sock_recv(client, 65536)


async def test_silent_connection_does_not_prolong_last_call(listener: socket.socket) -> None:
    async with running(listener) as run:
        _, writer = await run.connect()
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await run.server.last_call(lambda: 0)
        assert LAST_CALL_SECONDS <= time.monotonic() - began < LAST_CALL_SECONDS + 2
        writer.close()


async def test_last_call_lasts_until_requests_reach_engine(listener: socket.socket) -> None:
    async with running(listener) as run:
        reader, writer = await run.connect()
        writer.write(GET)
        in_engine: list[int] = []
        ending = asyncio.create_task(run.server.last_call(lambda: len(in_engine)))
        await asyncio.sleep(LAST_CALL_SECONDS + 0.3)
        assert run.application.begun == 1
        assert not ending.done(), "it is still being read"
        in_engine.append(1)
        await asyncio.wait_for(ending, 2)
        run.application.may_answer.set()
        await response(reader)
        writer.close()


async def test_draining_server_answers_503_with_retry_after(listener: socket.socket) -> None:
    async with running(listener) as run:
        busy, idle = await run.connect(), await run.connect()
        busy[1].write(GET)
        async with asyncio.timeout(5):
            while not run.application.begun:  # noqa: ASYNC110  uvicorn offers nothing to wait for
                await asyncio.sleep(0.005)
        run.server.drain()
        late, posting = await run.connect(), await run.connect()
        post = GET.replace(b"GET", b"POST")[:-2] + b"Content-Length: 9\r\n\r\n{"
        for (reader, writer), request in ((idle, GET), (late, GET), (posting, post)):
            writer.write(request)
            head, _, body = (await reader.read()).lower().partition(b"\r\n\r\n")
            assert head.startswith(b"http/1.1 503 ")
            assert b"\r\nretry-after: " in head
            assert b"\r\nconnection: close" in head
            assert b"engine_unavailable" in body
            writer.close()
        assert run.application.begun == 1
        run.application.may_answer.set()
        assert b"200 OK" in await response(busy[0])


async def test_connection_after_last_call_is_served_by_successor(
    listener: socket.socket,
) -> None:
    async with running(listener) as first:
        await first.server.last_call(lambda: 0)
        reader, writer = await first.connect()
        writer.write(GET)
        await asyncio.sleep(0.2)
        assert first.application.begun == 0
    async with running(listener) as second:
        second.application.may_answer.set()
        await response(reader)
        writer.close()
