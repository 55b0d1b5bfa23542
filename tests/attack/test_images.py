"""Images that are costly to decode: other requests do not wait, and nothing is left."""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import time
from contextlib import ExitStack
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.daemons import Daemon, wait_until
from tests.support.image_files import large_png, other_jpeg, other_png, slow_jpeg
from tests.support.images import one_shape, user

pytestmark = pytest.mark.attack

FAST_SECONDS = 30.0
"""A small image takes 0.2 s on an idle machine. It waited for 75 s behind two that had left."""
NUMBERS = count()


def body(*images: bytes, kind: str = "png") -> bytes:
    urls = [f"data:image/{kind};base64,{base64.b64encode(data).decode()}" for data in images]
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}
    return msgspec.json.encode({"model": "default", "messages": [message], "max_tokens": 4})


def large_request() -> bytes:
    """A request with sixteen new images of 49 megapixels."""
    whole = large_png(7000)
    return body(*(other_png(whole, next(NUMBERS)) for _ in range(16)))


@cache
def slow_image() -> bytes:
    """An image that takes seconds to decode within all limits of pixels and scans."""
    return slow_jpeg(4000, 85)


def send(daemon: Daemon, data: bytes) -> socket.socket:
    """A client that waits for an answer until it is closed."""
    client = socket.create_connection(("127.0.0.1", daemon.port), timeout=60)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    )
    client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
    return client


def num_preparing(daemon: Daemon) -> int:
    return int(daemon.status()["engine"]["stats"]["requests"]["preparing"])


def small_seconds(daemon: Daemon) -> float:
    """The seconds of an answer about a small, uncached image."""
    started = time.monotonic()
    image = one_shape("circle", "blue", (64, 64), background=(250, 250, next(NUMBERS) % 256))
    daemon.client(timeout=120).chat.completions.create(
        model="default", messages=[user(image, "what?")], max_tokens=4
    )
    return time.monotonic() - started


def process_tree(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True)
    return [
        pid,
        *(descendant for child in found.stdout.split() for descendant in process_tree(int(child))),
    ]


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and its living descendants."""
    ticks = 0
    for process in process_tree(pid):
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def wait_quiet(daemon: Daemon) -> None:
    """Wait until no request is tracked and the CPU is idle."""
    daemon.wait_idle(20)

    def is_quiet() -> bool:
        before = cpu_seconds(daemon.process.pid)
        time.sleep(0.5)
        return cpu_seconds(daemon.process.pid) - before < 0.15

    wait_until(is_quiet, 20, daemon.log)


def test_small_image_overtakes_requests_of_many_pixels(daemon: Daemon) -> None:
    with ExitStack() as clients:
        for _ in range(2):
            clients.enter_context(send(daemon, large_request()))
        wait_until(lambda: num_preparing(daemon), 30, daemon.log)
        for _ in range(3):
            assert small_seconds(daemon) < FAST_SECONDS
        assert num_preparing(daemon), "they were still being prepared"
    wait_quiet(daemon)


@pytest.mark.whole
def test_abandoned_images_do_not_delay_small_ones(daemon: Daemon) -> None:
    for _ in range(2):
        with ExitStack() as clients:
            for _ in range(4):
                clients.enter_context(send(daemon, large_request()))
            wait_until(lambda: num_preparing(daemon), 30, daemon.log)
        assert small_seconds(daemon) < FAST_SECONDS
    wait_quiet(daemon)


def test_decoding_ends_with_its_last_client(daemon: Daemon) -> None:
    """Twenty-four clients with an image that is slow to decode despite a harmless header."""
    with ExitStack() as clients:
        for _ in range(24):
            image = other_jpeg(slow_image(), next(NUMBERS))
            clients.enter_context(send(daemon, body(image, kind="jpeg")))
        wait_until(lambda: num_preparing(daemon) >= 2, 30, daemon.log)
    wait_quiet(daemon)
    assert small_seconds(daemon) < FAST_SECONDS
