"""Costly bodies: health checks, running streams and other requests go on."""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemons import (
    SCRIPTED,
    Daemon,
    command_of,
    running_daemon,
    wait_until,
    with_settings,
)
from tests.support.image_files import data_url, image_file
from tests.unit.api.parsing.media.test_image_bounds import BOMBS
from tests.unit.api.requests import ROUTE, chat, image_part, user

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")

BODY_BYTES = 64 << 20
MEMORY_BYTES = 64 << 20
"""What the front may have more than before; four bodies are four times as much."""
PARSING_SECONDS = 6.0
IMPATIENT_SECONDS = 1.5
GAP_SECONDS = 1.5
"""Generous: 0.1 s on an idle machine; it was 13 to 100 s."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with a scripted engine and time to parse hostile bodies to their end."""
    with reading_daemon(tmp_path_factory.mktemp("daemon"), PARSING_SECONDS) as running:
        yield running


@pytest.fixture(scope="module")
def impatient_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """The same daemon with little time to parse a body."""
    with reading_daemon(tmp_path_factory.mktemp("impatient"), IMPATIENT_SECONDS) as running:
        yield running


@contextmanager
def reading_daemon(folder: Path, parsing_seconds: float) -> Iterator[Daemon]:
    settings = (f"limits.parsing_timeout_seconds={parsing_seconds}", "engine.openblas=off")
    with running_daemon(folder, *with_settings(*settings), program=SCRIPTED) as running:
        yield running
    assert "Traceback" not in running.log.read_text()


def filled_body(before: bytes, unit: bytes, after: bytes) -> bytes:
    return before + unit * ((BODY_BYTES - len(before) - len(after)) // len(unit)) + after


HOSTILE: dict[str, Callable[[], bytes]] = {
    "lists": lambda: filled_body(b'{"x":[', b"[],", b"[]]}"),
    "names": lambda: b"{" + b",".join(b'"%07x":1' % n for n in range(5_300_000)) + b"}",
    "one name": lambda: filled_body(b'{"', b"k", b'":1}'),
    "a role": lambda: filled_body(b'{"model":"demo","messages":[{"role":"', b"s", b'"}]}'),
    "wide text": lambda: filled_body('{"model":"🦊'.encode(), b"s", b'"}'),
    "depth": lambda: filled_body(b"", b'{"x":', b""),
}


def post(daemon: Daemon, body: bytes) -> tuple[int, dict[str, Any]]:
    with send(daemon, body) as client:
        return answer_of(client)


def send(daemon: Daemon, body: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", daemon.port), timeout=120)
    head = (
        f"POST {ROUTE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    client.sendall(head.encode())
    client.sendall(body)
    return client


def answer_of(client: socket.socket) -> tuple[int, dict[str, Any]]:
    answer = bytearray()
    while data := client.recv(1 << 16):
        answer += data
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def small_image(**fields: Any) -> bytes:
    return json.dumps(chat(user(image_part()), max_tokens=1, **fields)).encode()


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def parser_pids(daemon: Daemon) -> set[int]:
    return {pid for pid in children(daemon.process.pid) if b"parsing.process" in command_of(pid)}


def children(pid: int) -> Iterator[int]:
    for folder in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ends meanwhile
            yield from map(int, (folder / "children").read_text().split())


@dataclass
class Times:
    """Seconds of health checks, and between the chunks of a stream."""

    health: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


def p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100)[98]


@contextmanager
def measured_times(daemon: Daemon) -> Iterator[Times]:
    """Measure health checks and a stream while the `with` block runs."""
    times = Times()
    over = threading.Event()

    def check() -> None:
        while not over.is_set():
            started = time.monotonic()
            urllib.request.urlopen(f"{daemon.url}/health/live", timeout=60).read()
            times.health.append(time.monotonic() - started)
            over.wait(0.02)

    def read_streams() -> None:
        client = daemon.client()
        while not over.is_set():
            stream = client.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": "Count."}],
                stream=True,
                max_tokens=400,
                extra_body={"ignore_eos": True},
            )
            last = time.monotonic()
            for _ in stream:
                times.gaps.append(time.monotonic() - last)
                last = time.monotonic()
                if over.is_set():
                    break
            stream.close()

    with ThreadPoolExecutor() as threads:
        done = [threads.submit(work) for work in (check, read_streams)]
        try:
            yield times
        finally:
            over.set()
            for future in done:
                future.result()


@pytest.mark.alone
@pytest.mark.parametrize(
    "names", [("lists", "names", "one name", "a role"), ("lists", "lists", "wide text", "depth")]
)
def test_hostile_bodies_delay_no_stream_and_leave_no_memory(daemon: Daemon, names: tuple[str, ...]):
    assert post(daemon, small_image())[0] == 200
    before = resident_bytes(daemon.process.pid)
    bodies = [HOSTILE[name]() for name in names]
    with measured_times(daemon) as times, ThreadPoolExecutor() as threads:
        answers = list(threads.map(lambda body: post(daemon, body), bodies))
    for status, answer in answers:
        assert status == 400
        assert len(answer["error"]["message"]) < 300
    assert p99(times.health + times.gaps) < GAP_SECONDS
    wait_until(lambda: resident_bytes(daemon.process.pid) < before + MEMORY_BYTES, 10, daemon.log)
    wait_until(lambda: daemon.num_in_flight() == 0, 10, daemon.log)
    assert sum(map(resident_bytes, parser_pids(daemon))) < 2 * MEMORY_BYTES
    assert post(daemon, small_image())[0] == 200


def test_header_bombs_are_refused_while_others_are_answered(daemon: Daemon):
    names = ["PNG, 10,000 profiles", "JPEG, fill bytes", "PNG, 1.7 million chunks", "GIF, zeros"]
    kinds = [data_url(BOMBS[name]()) for name in names]
    bombs = [json.dumps(chat(user(image_part(url)))).encode() for url in kinds]
    with ThreadPoolExecutor() as threads:
        hostile = [threads.submit(post, daemon, bomb) for bomb in bombs]
        honest: list[Future[Any]] = [
            threads.submit(post, daemon, body)
            for body in (json.dumps(chat(max_tokens=1)).encode(), small_image())
        ]
        started = time.monotonic()
        assert [other.result()[0] for other in honest] == [200, 200]
        assert time.monotonic() - started < 10
        for future in hostile:
            status, answer = future.result()
            assert (status, answer["error"]["code"]) == (400, "invalid_image")
            assert answer["error"]["param"] == "messages[0].content[0]"


@contextmanager
def stopped_parsers(daemon: Daemon) -> Iterator[set[int]]:
    """Suspend the idle parsing processes, as if their work took forever."""
    assert post(daemon, small_image())[0] == 200
    wait_until(lambda: len(parser_pids(daemon)) >= 1, 10, daemon.log)
    pids = parser_pids(daemon)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield pids
    finally:
        for pid in pids & parser_pids(daemon):
            os.kill(pid, signal.SIGCONT)


def test_disconnected_client_ends_parsing_of_its_body(daemon: Daemon):
    with stopped_parsers(daemon):
        pids = parser_pids(daemon)
        with send(daemon, small_image()):
            wait_until(lambda: daemon.num_in_flight() == 1, 10, daemon.log)
            time.sleep(0.2)  # until the process has it
        wait_until(lambda: daemon.num_in_flight() == 0, PARSING_SECONDS / 2, daemon.log)
        wait_until(lambda: not pids <= parser_pids(daemon), PARSING_SECONDS / 2, daemon.log)
    assert post(daemon, small_image())[0] == 200


def test_body_over_parsing_time_is_413_and_next_is_parsed(impatient_daemon: Daemon):
    with stopped_parsers(impatient_daemon):
        status, answer = post(impatient_daemon, small_image())
    assert (status, answer["error"]["code"]) == (413, "request_too_costly")
    assert post(impatient_daemon, small_image())[0] == 200


def test_text_bodies_do_not_wait_for_media_bodies(daemon: Daemon):
    with stopped_parsers(daemon), ExitStack() as waiting:
        for _ in range(6):
            waiting.enter_context(send(daemon, small_image()))
        started = time.monotonic()
        assert post(daemon, json.dumps(chat(max_tokens=1)).encode())[0] == 200
        assert time.monotonic() - started < PARSING_SECONDS
    wait_until(lambda: daemon.num_in_flight() == 0, 10, daemon.log)


def test_killed_parsing_process_fails_no_request(daemon: Daemon):
    with stopped_parsers(daemon) as pids, ThreadPoolExecutor() as threads:
        pending = threads.submit(post, daemon, small_image())
        wait_until(lambda: daemon.num_in_flight() == 1, 10, daemon.log)
        time.sleep(0.2)  # until the process has it
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert pending.result()[0] == 200


def test_images_are_answered_correctly_after_hostile_bodies(daemon: Daemon):
    url = data_url(image_file("PNG", (64, 48)))
    status, answer = post(daemon, json.dumps(chat(user(image_part(url)), max_tokens=1)).encode())
    assert (status, answer["usage"]["completion_tokens"]) == (200, 1)
