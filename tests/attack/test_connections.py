"""Clients that misuse their connections do not affect others.

The engine is scripted, since the front is the subject."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.daemons import SCRIPTED, Daemon, running_daemon, wait_until, with_settings
from vlm_server.api.http.connection.server import RESERVED_FILES

MAX_REQUESTS = 4
MAX_CONNECTIONS = 120
HEADER_SECONDS = 0.5
UNREAD_SECONDS = 0.5
KEEPALIVE_SECONDS = 0.25

SETTINGS = (
    f"limits.max_requests={MAX_REQUESTS}",
    f"limits.unread_timeout_seconds={UNREAD_SECONDS}",
    "limits.max_unread_bytes=65536",
    f"server.max_connections={MAX_CONNECTIONS}",
    f"server.header_timeout_seconds={HEADER_SECONDS}",
    f"server.stream_keepalive_seconds={KEEPALIVE_SECONDS}",
    "limits.default_max_tokens=16",
    "engine.openblas=off",
    "engine.min_restart_backoff_seconds=0.05",
)
HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
TWO_LENGTHS = b"Content-Length: 60\r\n" + CHUNKED
SMUGGLED = b"\r\n0\r\n\r\nGET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
"""To a server that goes by the chunks: the end of the body, and another request behind it."""
LONG_ANSWER: dict[str, Any] = {
    "stream": True,
    "n": 4,
    "max_tokens": 200,
    "ignore_eos": True,
    "logprobs": True,
    "top_logprobs": 20,
}
"""About 1.5 MB of events."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("connections")
    with running_daemon(folder, *with_settings(*SETTINGS), program=SCRIPTED) as running:
        yield running


@pytest.fixture
def clients(daemon: Daemon) -> Iterator[contextlib.ExitStack]:
    """A stack that closes all sockets at the end; then no queue slot may be taken."""
    with contextlib.ExitStack() as stack:
        yield stack
    wait_until(lambda: daemon.num_in_flight() == 0, 20, daemon.log)
    assert hello(daemon)


def connect(daemon: Daemon, clients: contextlib.ExitStack, *sent: bytes) -> socket.socket:
    client = clients.enter_context(socket.create_connection(("127.0.0.1", daemon.port), 20))
    for piece in sent:
        client.sendall(piece)
    return client


def chat(**fields: Any) -> bytes:
    """The bytes of a whole request."""
    messages = [{"role": "user", "content": "Hello"}]
    body = json.dumps({"model": "default", "messages": messages, **fields}).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def hello(daemon: Daemon) -> bool:
    answer = daemon.client().chat.completions.create(
        model="default", messages=[{"role": "user", "content": "Hello"}], max_tokens=2
    )
    return answer.usage is not None and answer.usage.completion_tokens > 0


def read_until(client: socket.socket, end: bytes) -> bytes:
    """All bytes up to `end`."""
    received = b""
    while end not in received:
        piece = client.recv(65536)
        assert piece, received
        received += piece
    return received


def read_to_end(client: socket.socket) -> bytes:
    """All bytes until the connection ends or is reset."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(65536):
            received += piece
    return received


def error_of(response: bytes) -> dict[str, Any]:
    head, _, body = response.partition(b"\r\n\r\n")
    assert b"application/json" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Suspend the process during the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


# ---- one client's bytes are not another's time -------------------------------------

FLOOD = """
import os, socket, sys
os.nice(10)  # the probe's own wait for a core is not what is measured
head, piece = (eval(word) for word in sys.argv[2:])
while True:
    try:
        with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 20) as client:
            client.sendall(head)
            while True:
                client.sendall(piece)
    except OSError:
        pass
"""
FLOODS = {
    "chunks of one byte": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n" * 5000),
    "extensions of chunks": (
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
        b"1;" + b"x" * 4000 + b"\r\n \r\n",
    ),
    "lines of a head": (b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a:\r\n" * 15000),
}


@pytest.mark.alone
@pytest.mark.parametrize("name", FLOODS)
def test_eight_floods_do_not_delay_health(daemon: Daemon, name: str) -> None:
    words = [str(daemon.port), *map(repr, FLOODS[name])]
    floods = [subprocess.Popen([sys.executable, "-c", FLOOD, *words]) for _ in range(8)]
    waits = []
    try:
        time.sleep(0.5)
        ends = time.monotonic() + 2
        while time.monotonic() < ends:
            began = time.monotonic()
            assert daemon.get("/health/live")[0] == 200
            waits.append(time.monotonic() - began)
            time.sleep(0.02)
    finally:
        for flood in floods:
            flood.kill()
            flood.wait()
    waits.sort()
    assert waits[len(waits) // 2] < 0.25, waits
    assert waits[-1] < 2.5, waits


# ---- connections -------------------------------------------------------------------


def test_silent_connections_are_closed_for_new_ones(
    daemon: Daemon, clients: contextlib.ExitStack
) -> None:
    silent = [connect(daemon, clients) for _ in range(MAX_CONNECTIONS * 2)]
    began = time.monotonic()
    assert daemon.get("/health/live")[0] == 200
    assert hello(daemon)
    assert [read_to_end(client) for client in silent] == [b""] * len(silent)
    assert time.monotonic() - began < HEADER_SECONDS + 10


def test_unfinished_request_head_is_408(daemon: Daemon, clients: contextlib.ExitStack) -> None:
    client = connect(daemon, clients, b"GET / HTTP/1.1\r\nHost: loc")
    answer = read_to_end(client)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert error_of(answer)["code"] == "request_timeout"


def test_running_answers_are_never_evicted_by_new_connections(
    daemon: Daemon, clients: contextlib.ExitStack
) -> None:
    with stopped(daemon.engine_pid()):
        running = [connect(daemon, clients, chat(max_tokens=2)) for _ in range(MAX_REQUESTS)]
        wait_until(lambda: daemon.num_in_flight() == MAX_REQUESTS, 10, daemon.log)
        for _ in range(MAX_CONNECTIONS * 2):
            connect(daemon, clients)
        assert daemon.get("/health/live")[0] == 200
    for client in running:
        assert b'"finish_reason"' in read_until(client, b'"usage"')


SHORT = b"socket.accept() out of system resource"


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of another process is set")
def test_missing_descriptors_do_not_flood_log(
    daemon: Daemon, clients: contextlib.ExitStack
) -> None:
    before = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)
    logged = daemon.log.stat().st_size
    resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (40, before[1]))
    try:
        silent = [connect(daemon, clients) for _ in range(60)]
        wait_until(lambda: SHORT in daemon.log.read_bytes()[logged:], 10, daemon.log)
        time.sleep(0.3)  # in which it could be said often
        for client in silent:
            client.close()
        wait_until(lambda: daemon.get("/health/live")[0] == 200, 10, daemon.log)
    finally:
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, before)
    assert daemon.log.stat().st_size - logged < 100_000


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of another process is set")
def test_lowered_file_limit_closes_idle_connections(
    daemon: Daemon, clients: contextlib.ExitStack
) -> None:
    live = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    idle = [connect(daemon, clients, live) for _ in range(60)]
    for client in idle:
        read_until(client, b"live")
    before = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)
    lower = (RESERVED_FILES + 20, before[1])
    resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, lower)
    try:
        assert hello(daemon)
        for client in idle[:40]:
            assert read_to_end(client) == b""
    finally:
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, before)


# ---- bodies ------------------------------------------------------------------------


def test_half_sent_bodies_hold_no_queue_slot(daemon: Daemon, clients: contextlib.ExitStack) -> None:
    half = HEAD + b'Content-Length: 100000\r\n\r\n{"model": "default", '
    for _ in range(5):
        with contextlib.ExitStack() as renewed:
            for _ in range(MAX_REQUESTS * 4):
                connect(daemon, renewed, half)
            assert daemon.num_in_flight() == 0
            assert hello(daemon)


def test_huge_refused_body_is_not_read(daemon: Daemon, clients: contextlib.ExitStack) -> None:
    client = connect(daemon, clients, HEAD, b"Content-Length: 100000000000\r\n\r\n")
    sent, piece = 0, b" " * 262144
    with contextlib.suppress(ConnectionError):
        while sent < 1 << 30:
            sent += client.send(piece)
    assert sent < 200 << 20


def test_refused_body_does_not_hide_answer(daemon: Daemon, clients: contextlib.ExitStack) -> None:
    client = connect(daemon, clients, HEAD, b"Content-Length: 70000000\r\n\r\n", b" " * 30_000_000)
    answer = read_to_end(client)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer
    assert error_of(answer)["code"] == "payload_too_large"


# ---- clients that do not read, or leave --------------------------------------------


def slow_reader(daemon: Daemon, clients: contextlib.ExitStack, request: bytes) -> socket.socket:
    client = clients.enter_context(socket.socket())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(20)
    client.connect(("127.0.0.1", daemon.port))
    client.sendall(request)
    return client


def test_stalled_readers_are_disconnected(daemon: Daemon, clients: contextlib.ExitStack) -> None:
    stalled = [
        slow_reader(daemon, clients, chat(**LONG_ANSWER, seed=seed)) for seed in range(MAX_REQUESTS)
    ]
    wait_until(lambda: daemon.num_in_flight() == MAX_REQUESTS, 10, daemon.log)
    wait_until(lambda: daemon.num_in_flight() == 0, 40, daemon.log)
    daemon.wait_idle(20)
    for client in stalled:
        assert not read_to_end(client).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_slow_reader_gets_its_answer(daemon: Daemon, clients: contextlib.ExitStack) -> None:
    client = slow_reader(daemon, clients, chat(**{**LONG_ANSWER, "n": 1, "max_tokens": 20}))
    received = b""
    while b"[DONE]" not in received:
        piece = client.recv(8192)
        assert piece
        received += piece
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("behind", [b"\r\n", b"GET / HTTP/1.1\r\nHo", chat() * 3])
@pytest.mark.parametrize("leave", ["close", "half-close"])
def test_disconnect_is_noticed_behind_pipelined_bytes(
    daemon: Daemon, clients: contextlib.ExitStack, stream: bool, behind: bytes, leave: str
) -> None:
    with stopped(daemon.engine_pid()):
        client = connect(daemon, clients, chat(stream=stream))
        wait_until(lambda: daemon.num_in_flight() == 1, 10, daemon.log)
        client.sendall(behind)
        if leave == "close":
            client.close()
        else:
            client.shutdown(socket.SHUT_WR)
        wait_until(lambda: daemon.num_in_flight() == 0, 5, daemon.log)


def test_too_many_pipelined_bytes_end_request(
    daemon: Daemon, clients: contextlib.ExitStack
) -> None:
    with stopped(daemon.engine_pid()):
        client = connect(daemon, clients, chat())
        wait_until(lambda: daemon.num_in_flight() == 1, 10, daemon.log)
        with contextlib.suppress(ConnectionError):
            client.sendall(b" " * 1_000_000)
        wait_until(lambda: daemon.num_in_flight() == 0, 5, daemon.log)


# ---- a long wait -------------------------------------------------------------------


def test_comments_keep_waiting_stream_alive(daemon: Daemon, clients: contextlib.ExitStack) -> None:
    with stopped(daemon.engine_pid()):
        client = connect(daemon, clients, chat(stream=True, max_tokens=4))
        waiting = read_until(client, b": keep-alive\n\n\r\n") + read_until(
            client, b": keep-alive\n\n\r\n"
        )
        assert waiting.startswith(b"HTTP/1.1 200 ")
    assert b'"finish_reason"' in read_until(client, b"[DONE]")


def test_official_client_reads_over_comments(daemon: Daemon) -> None:
    """The client's timeout is shorter than the wait for the first token."""
    engine = daemon.engine_pid()
    with stopped(engine):
        threading.Timer(KEEPALIVE_SECONDS * 5, os.kill, (engine, signal.SIGCONT)).start()
        stream = daemon.client(timeout=KEEPALIVE_SECONDS * 3).chat.completions.create(
            model="default", messages=[{"role": "user", "content": "Hello"}], stream=True
        )
        assert list(stream)[-1].choices[0].finish_reason


def test_engine_death_after_keepalive_is_error_event(
    daemon: Daemon, clients: contextlib.ExitStack
) -> None:
    engine = daemon.engine_pid()
    with stopped(engine):
        client = connect(daemon, clients, chat(stream=True))
        read_until(client, b": keep-alive\n\n")
        threading.Timer(KEEPALIVE_SECONDS * 3, os.kill, (engine, signal.SIGKILL)).start()
        with pytest.raises(openai.APIError, match="engine process ended"):
            list(
                daemon.client().chat.completions.create(
                    model="default", messages=[{"role": "user", "content": "Hello"}], stream=True
                )
            )
        assert b'"code":"engine_died"' in read_until(client, b"\r\n0\r\n\r\n")
    daemon.wait_ready()


# ---- bytes that are no request -----------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"nonsense\r\n\r\n", 400, "invalid_value"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "invalid_value"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "invalid_value"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nsecret value\r\n\r\n", 400, "invalid_value"),
        (HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", 400, "invalid_value"),
        (HEAD + b"Transfer-Encoding: gzip\r\n\r\n", 400, "invalid_value"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "invalid_value"),
        (HEAD + TWO_LENGTHS + SMUGGLED, 400, "invalid_value"),
        (HEAD.replace(b"1.1", b"1.0") + CHUNKED + SMUGGLED, 400, "invalid_value"),
        (HEAD + b"a: " + b"x" * 70_000 + b"\r\n\r\n", 431, "headers_too_large"),
        (HEAD + b"a:\r\n" * 1000 + b"\r\n", 431, "headers_too_large"),
    ],
)
def test_malformed_http_is_error_in_openais_shape(
    daemon: Daemon, clients: contextlib.ExitStack, sent: bytes, status: int, code: str
) -> None:
    answer = read_to_end(connect(daemon, clients, sent))
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert answer.count(b"\r\nx-request-id: ") == 1, "what stands behind it is no request"
    error = error_of(answer)
    assert error["code"] == code
    assert "secret" not in error["message"]


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        (b"http://127.0.0.1:8000/health/live", b"localhost", 200),
        (b"HTTP://LOCALHOST/health/live?x=1", b"localhost", 200),
        (b"http://localhost", b"localhost", 200),
        (b"http://evil.example/health/live", b"localhost", 403),
        (b"http://localhost@evil.example/health/live", b"localhost", 403),
        (b"http:///health/live", b"localhost", 403),
        (b"ftp://localhost/health/live", b"localhost", 404),
        (b"/health/live", b"evil.example", 403),
    ],
)
def test_absolute_uri_with_foreign_host_is_refused(
    daemon: Daemon, clients: contextlib.ExitStack, target: bytes, host: bytes, status: int
) -> None:
    request = b"GET %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n" % (target, host)
    answer = read_to_end(connect(daemon, clients, request))
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer


# ---- the end -----------------------------------------------------------------------


def test_open_connections_do_not_delay_shutdown(daemon: Daemon) -> None:
    """Must be the last test, since it ends the shared daemon."""
    logged = daemon.log.stat().st_size
    with contextlib.ExitStack() as clients:
        connect(daemon, clients)
        connect(daemon, clients, b"POST /v1/chat")
        half = [
            connect(daemon, clients, HEAD, b"Content-Length: 1000\r\n\r\n{"),
            connect(daemon, clients, HEAD, b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"),
        ]
        idle = connect(daemon, clients, b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        read_until(idle, b"live")
        slow_reader(daemon, clients, chat(**{**LONG_ANSWER, "max_tokens": 150}))
        wait_until(lambda: daemon.num_in_flight() == 1, 10, daemon.log)
        began = time.monotonic()
        daemon.process.send_signal(signal.SIGTERM)
        for client in half:
            assert error_of(read_to_end(client))["code"] == "engine_unavailable"
        assert daemon.process.wait(20) == 0
        assert time.monotonic() - began < 15
        assert b"Traceback" not in daemon.log.read_bytes()[logged:]
