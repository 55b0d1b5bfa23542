"""What four hostile bodies at once cost everybody else: the p99 of health checks and of a stream.

By hand: `python -m tests.attack.body_latency --rounds 3` starts a daemon and attacks it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Event
from pathlib import Path

from tests.attack.test_bodies import HOSTILE, filled, measured, p99, post
from tests.e2e.daemon import Daemon, running_daemon
from tests.unit.api.requests import chat, picture, user
from tests.unit.media.pictures import data_url
from tests.unit.media.test_image_bounds import BOMBS

NUM_BODIES = 4


def image(name: str) -> Callable[[], bytes]:
    return lambda: json.dumps(chat(user(picture(data_url(BOMBS[name]()))))).encode()


KINDS: dict[str, Callable[[], bytes]] = {
    **HOSTILE,
    "a string": lambda: filled(b'{"messages":[{"role":"user","content":"', b"s", b'"}]}'),
    "PNG, 10,000 profiles": image("PNG, 10,000 profiles"),
    "JPEG, fill bytes": image("JPEG, fill bytes"),
}


def send_all(daemon: Daemon, kind: str, ready: Event, start: Event) -> None:
    body = KINDS[kind]()
    ready.set()
    start.wait()
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda _: post(daemon, body), range(NUM_BODIES)))


def attack(daemon: Daemon, kind: str) -> tuple[float, float]:
    """The p99 of health checks and of a stream's gaps, in seconds, while bodies are sent.

    They are sent by a process of its own, or its Python lock would be measured.
    """
    ready, start = multiprocessing.Event(), multiprocessing.Event()
    sender = multiprocessing.Process(target=send_all, args=(daemon, kind, ready, start))
    sender.start()
    ready.wait()
    with measured(daemon) as times:
        start.set()
        sender.join()
    return p99(times.health), p99(times.gaps)


def main(rounds: int) -> None:
    with running_daemon(Path(tempfile.mkdtemp())) as daemon:
        print(f"p99 of health checks, and of a stream's gaps, in ms; {rounds} rounds")
        for kind in KINDS:
            figures = [attack(daemon, kind) for _ in range(rounds)]
            health, gaps = (
                " ".join(f"{1e3 * each:.0f}" for each in one) for one in zip(*figures, strict=True)
            )
            print(f"{kind:22} {health:24} {gaps}", flush=True)
            time.sleep(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    main(**vars(parser.parse_args()))
