"""The p99 of health checks and of a stream while four hostile bodies are sent.

By hand: `python -m tests.attack.body_latency` starts a daemon and attacks it. Senders and measuring
clients are processes of their own; in one process, Python's lock would be measured."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path

from tests.attack.test_bodies import HOSTILE, Times, filled_body, p99, post
from tests.support.daemons import Daemon, running_daemon
from tests.support.image_files import data_url
from tests.unit.api.parsing.media.test_image_bounds import BOMBS
from tests.unit.api.requests import ROUTE, chat, image_part, user

NUM_BODIES = 4
HEALTH_SECONDS = 0.01
"""Between two checks."""


def image_body(name: str) -> Callable[[], bytes]:
    return lambda: json.dumps(chat(user(image_part(data_url(BOMBS[name]()))))).encode()


KINDS: dict[str, Callable[[], bytes] | None] = {
    "nothing": None,
    **HOSTILE,
    "a string": lambda: filled_body(b'{"messages":[{"role":"user","content":"', b"s", b'"}]}'),
    "PNG, 10,000 profiles": image_body("PNG, 10,000 profiles"),
    "JPEG, fill bytes": image_body("JPEG, fill bytes"),
}


def send(daemon: Daemon, kind: str, ready: Barrier, over: Event) -> None:
    """Send the body again and again, as one of the attackers."""
    make = KINDS[kind]
    body = make() if make else None
    ready.wait()
    while not over.is_set():
        if body is None:
            over.wait()
        else:
            post(daemon, body)


def measure(daemon: Daemon, ready: Barrier, over: Event, result: Connection) -> None:
    times = Times()
    works = (check, read_streams)
    threads = [threading.Thread(target=work, args=(daemon, times, over)) for work in works]
    ready.wait()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    result.send(times)


def check(daemon: Daemon, times: Times, over: Event) -> None:
    while not over.is_set():
        started = time.perf_counter()
        connection = HTTPConnection("127.0.0.1", daemon.port, timeout=60)
        connection.request("GET", "/health/live")
        assert connection.getresponse().read() is not None
        connection.close()
        times.health.append(time.perf_counter() - started)
        over.wait(HEALTH_SECONDS)


def read_streams(daemon: Daemon, times: Times, over: Event) -> None:
    request = chat(user("Count."), stream=True, max_tokens=400, ignore_eos=True)
    body = json.dumps(request).encode()
    head = (
        f"POST {ROUTE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    while not over.is_set():
        with socket.create_connection(("127.0.0.1", daemon.port), timeout=60) as stream:
            stream.sendall(head.encode() + body)
            last = None
            while stream.recv(1 << 16) and not over.is_set():
                now = time.perf_counter()
                times.gaps += [] if last is None else [now - last]
                last = now


def attack(daemon: Daemon, kind: str, seconds: float) -> Times:
    """The measurements while four clients send bodies of one kind for `seconds`."""
    ready, over = multiprocessing.Barrier(NUM_BODIES + 2), multiprocessing.Event()
    receiver, sender = multiprocessing.Pipe(duplex=False)
    processes = [
        multiprocessing.Process(target=send, args=(daemon, kind, ready, over))
        for _ in range(NUM_BODIES)
    ]
    processes.append(multiprocessing.Process(target=measure, args=(daemon, ready, over, sender)))
    for process in processes:
        process.start()
    ready.wait()
    time.sleep(seconds)
    over.set()
    times: Times = receiver.recv()
    for process in processes:
        process.join()
    return times


def main(rounds: int, seconds: float) -> None:
    with running_daemon(Path(tempfile.mkdtemp())) as daemon:
        print(f"p99 in ms of health checks, and of a stream's gaps; {rounds} rounds of {seconds} s")
        for kind in KINDS:
            measured = [attack(daemon, kind, seconds) for _ in range(rounds)]
            health = " ".join(f"{1e3 * p99(times.health):.0f}" for times in measured)
            gaps = " ".join(f"{1e3 * p99(times.gaps):.0f}" for times in measured)
            count = sum(len(times.health) for times in measured)
            print(f"{kind:22} {health:18} {gaps:18} ({count} checks)", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10)
    chosen = parser.parse_args()
    main(chosen.rounds, chosen.seconds)
