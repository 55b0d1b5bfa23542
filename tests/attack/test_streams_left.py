"""Clients that leave resumable streams, resume them wrongly, or too often, do not affect others.

The engine is scripted, since the front is the subject.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
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
from vlm_server.platform.footprint import footprint_bytes

pytestmark = pytest.mark.timeout(300)

SECONDS = 2.0
MIB = 1 << 20
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SETTINGS = (
    f"server.stream_resume_keep_seconds={SECONDS}",
    f"server.max_stream_resume_bytes={2 * MIB}",
    f"server.max_stream_resume_bytes_per_key={MIB}",
    "engine.openblas=off",
    "engine.min_restart_backoff_seconds=0.05",
)
LONG = 5_000
"""Tokens of an answer that takes ten seconds and more."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("streams")
    settings = with_settings(*SETTINGS, f"server.api_key_file={write_keys(folder / 'keys')}")
    with running_daemon(folder, *settings, api_key=ADMIN_KEY, program=SCRIPTED) as running:
        yield running


def chat(script: str = "Hello", **fields: Any) -> dict[str, Any]:
    return {"model": "default", "messages": [{"role": "user", "content": script}], **fields}


async def abandon(daemon: Daemon, **fields: Any) -> int:
    """Begin a long resumable stream, and leave it; returns its status."""
    body = chat(stream=True, max_tokens=LONG, **fields)
    return await leave(daemon, CHAT, body, "X-VLM-Resumable: true")


def until_empty(daemon: Daemon) -> None:
    """Wait until neither a slot nor a byte is in use."""
    leaving.until_empty(daemon, "resumable_streams", "resumable_streams_size_bytes")


@pytest.mark.parametrize(
    ("num_streams", "fields"),
    [
        (300, {}),
        pytest.param(300, {"logprobs": True, "top_logprobs": 20}, marks=pytest.mark.whole),
        pytest.param(3000, {}, marks=pytest.mark.whole),
    ],
    ids=["some", "heavy", "many"],
)
def test_abandoned_streams_leave_slots_memory_and_answers_to_others(
    daemon: Daemon, num_streams: int, fields: dict[str, Any]
) -> None:
    before_bytes, sizes, times = footprint_bytes(daemon.process.pid), [0.0], list[float]()
    statuses = Counter[int]()

    async def attack() -> None:
        async with client_of(daemon, USER_KEY) as other:
            left = asyncio.Semaphore(32)

            async def one() -> None:
                async with left:
                    statuses[await abandon(daemon, **fields)] += 1

            async def watch() -> None:
                while True:
                    began = time.monotonic()
                    answer = await other.post(CHAT, json=chat(max_tokens=2))
                    assert answer.status_code == 200, answer.text
                    times.append(time.monotonic() - began)
                    kept = await asyncio.to_thread(daemon.metrics)
                    sizes.append(kept["resumable_streams_size_bytes"])
                    await asyncio.sleep(0.05)

            watching = asyncio.create_task(watch())
            await asyncio.gather(*(one() for _ in range(num_streams)))
            watching.cancel()

    asyncio.run(attack())
    until_empty(daemon)
    growth = footprint_bytes(daemon.process.pid) - before_bytes
    times.sort()
    print(
        f"{dict(statuses)} streams begun and left, or refused; {len(times)} requests of another "
        f"key answered, median {times[len(times) // 2]:.3f} s, at most {times[-1]:.3f} s; at most "
        f"{max(sizes) / MIB:.2f} MiB of events; front grown by {growth / MIB:.1f} MiB"
    )
    assert statuses[200] > num_streams / 10
    assert set(statuses) <= {200, 429}
    assert 0 < max(sizes) <= MIB + 64 * 16384
    assert growth < 48 * MIB


def test_many_readers_of_running_stream_are_bounded(daemon: Daemon) -> None:
    """The last four have it whole, once each; those before end without its end."""

    async def read(client: httpx.AsyncClient, response_id: str) -> str:
        query = "stream=true"
        return (await client.get(f"{RESPONSES}/{response_id}?{query}")).text

    async def attack() -> list[str]:
        async with client_of(daemon) as client:
            body = {"input": "Hello", "background": True, "max_output_tokens": 3000}
            response = (await client.post(RESPONSES, json=body)).json()
            return await asyncio.gather(*(read(client, response["id"]) for _ in range(150)))

    contents = asyncio.run(attack())
    ends = [content.count("event: response.incomplete\n") for content in contents]
    assert sum(ends) == 4
    assert (
        len({content.replace(": resumed\n", "") for content in contents if "[DONE]" in content})
        == 1
    )
    until_empty(daemon)


NUMBERS = (
    *("-1", "-0", "+1", "1.5", "1e9", "0x1", "", " ", "null", "NaN", "٣", "²", "true", "1,2"),
    *("9" * 12, "9" * 19, "9" * 400, "18446744073709551616", "%00", "1%20", "%2B1"),
)
IDS = (
    *("-1", ":", ":1", "x", "0" * 31, "0" * 33, "0" * 32, f"{'0' * 32}:", f"{'0' * 32}:-1"),
    *(
        f"{'0' * 32}:{'9' * 400}",
        f"{'F' * 32}:1",
        "resp_" + "0" * 32,
        "../../etc",
        "é".encode("latin-1"),
    ),
)


def test_wrong_numbers_and_ids_are_refused(daemon: Daemon) -> None:
    async def attack() -> None:
        async with client_of(daemon) as client:
            body = {"input": "wait", "background": True}
            response_id = (await client.post(RESPONSES, json=body)).json()["id"]
            for number in NUMBERS:
                query = f"stream=true&starting_after={number}"
                answer = await client.get(f"{RESPONSES}/{response_id}?{query}")
                assert answer.status_code == 400, (number, answer.text)
                assert answer.json()["error"]["param"] == "starting_after"
            for event_id in IDS:
                headers = {
                    b"Last-Event-ID": event_id if isinstance(event_id, bytes) else event_id.encode()
                }
                answer = await client.post(CHAT, json=chat(), headers=headers)
                assert answer.status_code in (400, 404), (event_id, answer.text)
            assert (await client.delete(f"{RESPONSES}/{response_id}")).status_code == 200

    asyncio.run(attack())
    until_empty(daemon)


def test_foreign_key_reads_cancels_and_deletes_nothing(daemon: Daemon) -> None:
    async def attack() -> None:
        async with client_of(daemon, USER_KEY) as mine, client_of(daemon) as other:
            body = {"input": "wait", "background": True}
            response_id = (await mine.post(RESPONSES, json=body)).json()["id"]
            path, stream_id = f"{RESPONSES}/{response_id}", response_id.removeprefix("resp_")
            answers = [
                await other.get(path),
                await other.get(f"{path}?stream=true"),
                await other.post(f"{path}/cancel"),
                await other.delete(path),
                await other.post(RESPONSES, json={}, headers={"Last-Event-ID": stream_id}),
            ]
            assert [answer.status_code for answer in answers] == [404] * 5
            assert (await mine.get(path)).json()["status"] == "queued"
            assert (await mine.post(f"{path}/cancel")).json()["status"] == "cancelled"

    asyncio.run(attack())
    until_empty(daemon)


def test_reader_that_does_not_read_is_disconnected_and_stream_goes_on(daemon: Daemon) -> None:
    """It may leave `limits.max_unread_bytes` unread; the run does not wait for it."""

    async def attack() -> str:
        async with client_of(daemon) as client:
            body = {"input": "Hello", "background": True, "max_output_tokens": LONG}
            response_id = (await client.post(RESPONSES, json=body)).json()["id"]
            path = f"{RESPONSES}/{response_id}"
            idle = socket.create_connection(("127.0.0.1", daemon.port))
            head = f"GET {path}?stream=true HTTP/1.1\r\nHost: localhost\r\n"
            idle.sendall(f"{head}Authorization: Bearer {ADMIN_KEY}\r\n\r\n".encode())
            with idle:
                for _ in range(600):
                    status = (await client.get(path)).json()["status"]
                    if status not in ("queued", "in_progress"):
                        break
                    await asyncio.sleep(0.1)
            return str(status)

    assert asyncio.run(attack()) == "incomplete"
    until_empty(daemon)


def test_engine_death_ends_left_streams_with_their_error(daemon: Daemon) -> None:
    async def attack() -> tuple[str, list[str]]:
        async with client_of(daemon) as client:
            body = chat("accept prefill token token wait", stream=True)
            headers = {"X-VLM-Resumable": "true"}
            async with client.stream("POST", CHAT, json=body, headers=headers) as response:
                await anext(response.aiter_raw())
                stream_id = response.headers["X-Request-Id"]
            background = {"input": "accept prefill token wait", "background": True}
            response_id = (await client.post(RESPONSES, json=background)).json()["id"]
            await client.post(CHAT, json=chat("accept prefill die"))
            resumed = {"Last-Event-ID": stream_id}
            contents = [(await client.post(CHAT, json={}, headers=resumed)).text for _ in range(2)]
            contents.append((await client.get(f"{RESPONSES}/{response_id}?stream=true")).text)
            return (await client.get(f"{RESPONSES}/{response_id}")).json()["status"], contents

    status, (first, second, background) = asyncio.run(attack())
    assert first == second
    assert (first.count('"code":"engine_died"'), first.count("[DONE]")) == (1, 0)
    assert first.count("text ") == 2
    assert background.count("event: response.failed\n") == 1
    assert status == "failed"
    daemon.wait_ready()
    until_empty(daemon)


def test_shutdown_ends_streams_without_clients(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A reader gets the end of what can't finish, and the daemon leaves after its drain."""
    folder = tmp_path_factory.mktemp("shutdown")
    settings = with_settings("server.drain_timeout_seconds=1", "engine.openblas=off")

    async def follow(running: Daemon) -> tuple[str, float]:
        async with client_of(running) as client:
            body = {"input": "accept prefill token wait", "background": True}
            response_id = (await client.post(RESPONSES, json=body)).json()["id"]
            await abandon(running)
            reading = asyncio.create_task(client.get(f"{RESPONSES}/{response_id}?stream=true"))
            await asyncio.sleep(0.3)
            began = time.monotonic()
            os.kill(running.process.pid, signal.SIGTERM)
            content = (await reading).text
            await asyncio.to_thread(running.process.wait, 20)
            return content, time.monotonic() - began

    with running_daemon(folder, *settings, program=SCRIPTED) as running:
        content, seconds = asyncio.run(follow(running))
        log = running.log.read_text()
    assert content.count("event: response.failed\n") == 1
    assert content.endswith("data: [DONE]\n" + content[content.rindex("id: ") :])
    assert seconds < 12
    assert "Traceback" not in log
