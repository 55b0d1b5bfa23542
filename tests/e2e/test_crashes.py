"""Death of the engine, death of the front and disconnects, at awkward moments.

Engines are scripted where only the front's reaction matters."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.child_pids import children_of
from tests.support.daemons import (
    SCRIPTED,
    Daemon,
    checkpoint,
    command_of,
    is_alive,
    running_daemon,
    wait_until,
    with_settings,
)
from tests.support.images import noise, user

pytestmark = pytest.mark.e2e

LONG = 6000


@pytest.fixture
def daemon_to_kill(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon for one test, with answers of any length."""
    settings = with_settings(
        "server.drain_timeout_seconds=1",
        "engine.min_restart_backoff_seconds=0.5",
        "engine.openblas=off",
        "log.level=debug",
    )
    with running_daemon(tmp_path, *settings, program=SCRIPTED) as daemon:
        yield daemon


def long_stream(daemon: Daemon) -> Any:
    """The chunks of an answer that outlasts any test."""
    return daemon.client().chat.completions.create(
        model="default",
        messages=[user(noise(1, (64, 64)), "Go on")],
        max_tokens=LONG,
        temperature=0,
        stream=True,
    )


def assert_answers(daemon: Daemon) -> None:
    answer = daemon.client().chat.completions.create(
        model="default", messages=[user(noise(1, (64, 64)), "What?")], max_tokens=4, temperature=0
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


def test_killed_engine_ends_its_stream_with_error(daemon_to_kill: Daemon) -> None:
    stream = long_stream(daemon_to_kill)
    for _ in range(5):
        next(stream)
    old = daemon_to_kill.engine_pid()
    os.kill(old, signal.SIGKILL)
    with pytest.raises(openai.APIError) as caught:
        list(stream)
    assert caught.value.code == "engine_died"
    assert daemon_to_kill.get("/health/live")[0] == 200
    wait_until(lambda: daemon_to_kill.get("/health/ready")[0] == 503, 5, daemon_to_kill.log)
    with pytest.raises(openai.InternalServerError) as refused:
        assert_answers(daemon_to_kill)
    assert refused.value.status_code == 503
    assert int(refused.value.response.headers["retry-after"]) >= 1
    daemon_to_kill.wait_ready()
    assert daemon_to_kill.engine_pid() != old
    assert_answers(daemon_to_kill)


def test_repeatedly_killed_engine_comes_back(daemon_to_kill: Daemon) -> None:
    """Killed while idle and while it starts; the daemon stays."""
    for delay in (0.0, 0.05, 0.3):
        daemon_to_kill.wait_ready()
        daemon_to_kill.kill_engine()
        wait_until(lambda: daemon_to_kill.status()["engine"]["pid"], 30, daemon_to_kill.log)
        time.sleep(delay)
        daemon_to_kill.kill_engine()
        assert daemon_to_kill.get("/health/live")[0] == 200
    daemon_to_kill.wait_ready()
    assert_answers(daemon_to_kill)


def test_engine_death_before_first_token_is_http_error(daemon_to_kill: Daemon) -> None:
    os.kill(daemon_to_kill.engine_pid(), signal.SIGSTOP)

    async def ask() -> Any:
        request = asyncio.create_task(
            daemon_to_kill.async_client().chat.completions.create(
                model="default", messages=[user("Hello")], stream=True, max_tokens=4
            )
        )
        while not daemon_to_kill.status()["requests"]["in_flight"]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        os.kill(daemon_to_kill.engine_pid(), signal.SIGKILL)
        return await request

    with pytest.raises(openai.InternalServerError) as caught:
        asyncio.run(ask())
    assert caught.value.status_code == 502
    daemon_to_kill.wait_ready()
    assert_answers(daemon_to_kill)


def test_request_that_killed_engines_is_refused(daemon_to_kill: Daemon) -> None:
    """Killed while it encodes, as by the kernel when memory is short."""

    async def ask_until_it_dies() -> Any:
        """Kill the engine once the front has logged that the device has begun."""
        begun = daemon_to_kill.log.read_text().count("the device works on")
        pid = daemon_to_kill.engine_pid()
        request = asyncio.create_task(large(daemon_to_kill.async_client()))
        while daemon_to_kill.log.read_text().count("the device works on") == begun:
            assert not request.done()
            await asyncio.sleep(0.02)
        os.kill(pid, signal.SIGKILL)
        return await request

    def large(client: Any) -> Any:
        image = user(noise(1, (1200, 1200)), "accept encode")
        return client.chat.completions.create(model="default", messages=[image], max_tokens=4)

    for _ in range(3):
        with pytest.raises(openai.InternalServerError) as died:
            asyncio.run(ask_until_it_dies())
        assert died.value.status_code == 502
        daemon_to_kill.wait_ready()
    with pytest.raises(openai.APIStatusError) as refused:
        large(daemon_to_kill.client())
    assert (refused.value.status_code, refused.value.code) == (413, "request_too_costly")
    assert 500 < int(refused.value.response.headers["retry-after"]) <= 600
    assert_answers(daemon_to_kill)
    engine = daemon_to_kill.status()["engine"]
    assert (engine["restarts"], engine["quarantine"]) == (3, {"shapes": 1, "refusals": 1})


def test_stopped_front_does_not_kill_engine(tmp_path: Path) -> None:
    """As with `docker pause` or a debugger: the engine works, the front does not listen."""
    silence_seconds = 0.6
    settings = with_settings(
        f"engine.silence_timeout_seconds={silence_seconds}", "engine.openblas=off"
    )
    with running_daemon(tmp_path, *settings, program=SCRIPTED) as daemon:
        pid = daemon.engine_pid()
        stream = daemon.client().chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "Go on"}],
            max_tokens=6000,
            stream=True,
        )
        next(stream)
        daemon.process.send_signal(signal.SIGSTOP)
        time.sleep(silence_seconds + 0.5)
        daemon.process.send_signal(signal.SIGCONT)
        time.sleep(silence_seconds)  # more than one look of the watchdog
        next(stream)
        stream.close()
        assert daemon.engine_pid() == pid
        daemon.wait_idle()


@pytest.mark.whole  # tests/integration/test_supervisor.py does it to the real engine, too
def test_killed_front_leaves_no_orphan(tmp_path: Path) -> None:
    model = ("--model", str(checkpoint("qwen3_vl")))
    with running_daemon(tmp_path, *model) as daemon:
        stream = long_stream(daemon)
        next(stream)
        engine = daemon.engine_pid()
        assert is_alive(engine)
        daemon.process.kill()
        daemon.process.wait()
        wait_until(lambda: not is_alive(engine), 5, daemon.log)


def test_front_killed_during_load_leaves_no_orphan(tmp_path: Path) -> None:
    with running_daemon(tmp_path, wait=False) as daemon:
        pids: list[int] = []

        def engine_is_there() -> bool:
            try:
                pid = daemon.status()["engine"]["pid"]
            except OSError:
                return False
            pids.extend([pid] if pid else [])
            return bool(pid)

        wait_until(engine_is_there, 20, daemon.log)
        daemon.process.kill()
        daemon.process.wait()
        wait_until(lambda: not is_alive(pids[0]), 20, daemon.log)


def test_terminated_front_cuts_long_streams_with_error(daemon_to_kill: Daemon) -> None:
    engine = daemon_to_kill.engine_pid()
    stream = long_stream(daemon_to_kill)
    next(stream)
    daemon_to_kill.process.send_signal(signal.SIGTERM)
    with pytest.raises((openai.APIError, httpx.HTTPError)):
        list(stream)  # it is longer than the drain: cut off with an error, not silently
    daemon_to_kill.process.wait(15)
    assert daemon_to_kill.process.returncode == 0
    assert not is_alive(engine)


def test_terminated_front_refuses_new_requests_with_503(tmp_path: Path) -> None:
    settings = with_settings("server.drain_timeout_seconds=60", "engine.openblas=off")
    with running_daemon(tmp_path, *settings, program=SCRIPTED) as daemon:
        stream = long_stream(daemon)
        next(stream)
        daemon.process.send_signal(signal.SIGTERM)
        wait_until(lambda: daemon.get("/health/live")[0] == 503, 20, daemon.log)
        assert daemon.get("/health/live")[1]["error"]["code"] == "engine_unavailable"
        next(stream)
        stream.close()
        assert daemon.process.wait(20) == 0


def test_terminated_front_finishes_short_answer(daemon_to_kill: Daemon) -> None:
    stream = daemon_to_kill.client().chat.completions.create(
        model="default", messages=[user("Go on")], max_tokens=300, stream=True
    )
    next(stream)
    daemon_to_kill.process.send_signal(signal.SIGTERM)
    assert list(stream)[-1].choices[0].finish_reason == "length"
    daemon_to_kill.process.wait(15)
    assert daemon_to_kill.process.returncode == 0


def test_terminated_front_answers_request_that_is_still_parsed(tmp_path: Path) -> None:
    with running_daemon(tmp_path, program=SCRIPTED) as daemon, ThreadPoolExecutor() as pool:
        (parser,) = (
            child
            for child in children_of(daemon.process.pid)
            if b"vlm_server.api.parsing.process" in command_of(child)
        )
        os.kill(parser, signal.SIGSTOP)
        message = user(noise(1, (64, 64)), "Go on")
        ask = daemon.client().chat.completions.create
        asking = pool.submit(ask, model="default", messages=[message], max_tokens=3)
        wait_until(lambda: daemon.status()["requests"]["list"], 20, daemon.log)
        daemon.process.send_signal(signal.SIGTERM)
        wait_until(lambda: daemon.get("/health/live")[0] == 503, 20, daemon.log)
        time.sleep(0.2)
        assert not asking.done()
        os.kill(parser, signal.SIGCONT)
        assert asking.result(20).choices[0].finish_reason == "length"
        assert daemon.process.wait(20) == 0


def test_disconnected_client_ends_its_request(tiny_daemon: Daemon) -> None:
    """Streaming or not, the engine drops the request within about a second."""
    stream = long_stream(tiny_daemon)
    next(stream)
    stream.close()
    with pytest.raises(openai.APITimeoutError):
        tiny_daemon.client(timeout=0.5).chat.completions.create(
            model="default", messages=[user("Go on")], max_tokens=LONG, temperature=0
        )
    tiny_daemon.wait_idle(3)


def test_connection_reset_during_upload_leaves_no_request(tiny_daemon: Daemon) -> None:
    for cut in (10, 200, 5000):
        with socket.create_connection(("127.0.0.1", tiny_daemon.port)) as connection:
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            head += b"Content-Type: application/json\r\nContent-Length: 100000\r\n\r\n"
            connection.sendall((head + b'{"messages": "' + b"x" * 5000)[:cut])
            linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    tiny_daemon.wait_idle(3)
    assert_answers(tiny_daemon)
