"""Watches that are left, fed with hostile files, or flooded do not affect others.

The engine is scripted, since the front is the subject: it answers every question alike.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.attack import leaving
from tests.attack.leaving import client_of, leave
from tests.support.daemons import (
    ADMIN_KEY,
    SCRIPTED,
    USER_KEY,
    Daemon,
    running_daemon,
    with_settings,
    write_keys,
)
from tests.support.image_files import encoded, png
from tests.support.images import noise
from tests.support.watching import plain, watching
from vlm_server.platform.footprint import footprint_bytes

pytestmark = pytest.mark.timeout(300)

MIB = 1 << 20
CHAT = {"model": "default", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
QUESTION = {"question": "Hello", "max_tokens": 2}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("watches")
    keys = write_keys(folder / "keys")
    settings = with_settings(
        f"server.api_key_file={keys}",
        "watch.max_watches_per_key=8",
        f"watch.max_bytes={4 * MIB}",
        "engine.openblas=off",
        "engine.min_restart_backoff_seconds=0.05",
    )
    with running_daemon(folder, *settings, api_key=ADMIN_KEY, program=SCRIPTED) as running:
        yield running


def until_empty(daemon: Daemon) -> None:
    """Wait until no watch is open, and neither a slot nor a byte is in use."""
    leaving.until_empty(daemon, "watches", "watches_size_bytes")


def test_watches_left_leave_places_and_memory_to_others(daemon: Daemon) -> None:
    before_bytes, statuses = footprint_bytes(daemon.process.pid), Counter[int]()

    async def attack() -> None:
        limit = asyncio.Semaphore(16)

        async def one() -> None:
            async with limit:
                statuses[await leave(daemon, "/v1/watch", QUESTION)] += 1

        async with client_of(daemon, USER_KEY) as other:
            leaving = asyncio.gather(*(one() for _ in range(400)))
            while not leaving.done():
                async with watching(other, **QUESTION) as watch:
                    await watch.give(plain("red"))
                    await watch.until("answer")
            await leaving

    asyncio.run(attack())
    until_empty(daemon)
    growth = footprint_bytes(daemon.process.pid) - before_bytes
    print(f"{dict(statuses)}; front grown by {growth / MIB:.1f} MiB")
    assert set(statuses) <= {200, 429}
    assert statuses[200] > 40
    assert growth < 32 * MIB


JPEG = encoded(noise(1, (640, 480)), "JPEG")
HOSTILE = {
    "nothing": b"\0",
    "text": b"GET / HTTP/1.1\r\n" * 1000,
    "cut": JPEG[: len(JPEG) // 2],
    "broken": JPEG[:2000] + os.urandom(2000) + JPEG[4000:],
    "bomb": png(60_000, 60_000),
    "many segments": JPEG[:2] + b"\xff\xfe\0\x02" * 500_000 + JPEG[2:],
    "HEIC": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(1000),
    "TIFF of other strips": b"II*\0\x08\0\0\0\xff\xff" + b"\xff" * 20_000,
}


def test_hostile_frames_are_refused_and_others_answered(daemon: Daemon) -> None:
    before_bytes, statuses, times = (
        footprint_bytes(daemon.process.pid),
        Counter[int](),
        list[float](),
    )

    async def attack() -> None:
        async with (
            client_of(daemon) as client,
            client_of(daemon, USER_KEY) as other,
            watching(client, **QUESTION) as watch,
        ):
            for _ in range(3):
                answers = asyncio.gather(*(watch.frame(data) for data in HOSTILE.values()))
                while not answers.done():
                    began_at = time.monotonic()
                    answer = await other.post("/v1/chat/completions", json=CHAT)
                    assert answer.status_code == 200
                    times.append(time.monotonic() - began_at)
                    await asyncio.sleep(0.02)
                statuses.update(answer.status_code for answer in await answers)
                await asyncio.sleep(1)
            await watch.give(plain("red"))
            await watch.until("answer")
            assert [e["type"] for e in watch.events if e["type"] == "end"] == []

    asyncio.run(attack())
    until_empty(daemon)
    growth = footprint_bytes(daemon.process.pid) - before_bytes
    print(f"{dict(statuses)}; others at most {max(times):.2f} s; grown by {growth / MIB:.1f} MiB")
    assert set(statuses) <= {200, 400, 413}
    assert statuses[400] >= 3 * (len(HOSTILE) - 1)  # a broken JPEG may still be one
    assert max(times) < 5
    assert growth < 32 * MIB


def test_flood_of_frames_is_refused_and_bounded(daemon: Daemon) -> None:
    """One key floods its watches with large frames; another's watch gets its answers."""
    frames = [encoded(noise(seed, (500, 500)), "BMP") for seed in range(8)]
    statuses = Counter[int]()

    async def attack() -> float:
        async with (
            client_of(daemon) as client,
            client_of(daemon, USER_KEY) as other,
            watching(client, **QUESTION, window=16, min_change=0) as flooded,
        ):

            async def flood() -> None:
                for data in frames * 4:
                    statuses[(await flooded.frame(data)).status_code] += 1

            flooding = asyncio.gather(*(flood() for _ in range(6)))
            async with watching(other, **QUESTION) as watch:
                began_at = time.monotonic()
                while (await watch.frame(plain("red"))).status_code != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
                await watch.until("answer")
                seconds = time.monotonic() - began_at
            await flooding
        return seconds

    seconds = asyncio.run(attack())
    until_empty(daemon)
    print(f"{dict(statuses)}; the other answered within {seconds:.2f} s")
    assert set(statuses) <= {200, 429}
    assert statuses[429] > 0
    assert seconds < 15


def test_engine_death_ends_no_watch(daemon: Daemon) -> None:
    async def attack() -> list[str]:
        async with (
            client_of(daemon) as client,
            watching(client, question="Hello", max_tokens=2000) as watch,
        ):
            await watch.give(plain("red"))
            await asyncio.sleep(0.3)
            deadly = {"role": "user", "content": "accept prefill die"}
            await client.post("/v1/chat/completions", json={**CHAT, "messages": [deadly]})
            await watch.until("answer")
            return [event["type"] for event in watch.events]

    kinds = asyncio.run(attack())
    assert kinds[0] == "started"
    assert kinds[-1] == "answer"
    assert kinds.count("notice") >= 2
    daemon.wait_ready()
    until_empty(daemon)


def test_shutdown_ends_watches_with_last_event(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("shutdown")
    settings = with_settings("server.drain_timeout_seconds=1", "engine.openblas=off")

    async def attack(running: Daemon) -> tuple[list[str], float]:
        async with client_of(running) as client, watching(client, **QUESTION) as watch:
            await watch.give(plain("red"))
            await watch.until("answer")
            began_at = time.monotonic()
            os.kill(running.process.pid, signal.SIGTERM)
            assert (await watch.until("end"))["reason"] == "shutdown"
            await asyncio.to_thread(running.process.wait, 20)
            return [event["type"] for event in watch.events], time.monotonic() - began_at

    with running_daemon(folder, *settings, program=SCRIPTED) as running:
        kinds, seconds = asyncio.run(attack(running))
    assert kinds == ["started", "answer", "end"]
    assert seconds < 10
