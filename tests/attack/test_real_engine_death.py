"""The real engine dies under a crowd, like the scripted one in `test_engine_death.py`."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.daemons import Daemon, checkpoint, running_daemon, wait_until
from tests.support.images import noise, user

SILENCE_SECONDS = 6
"""More than any step takes on a busy machine."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("mortal")
    with running_daemon(
        folder,
        *("--model", str(checkpoint("qwen3_vl"))),
        *("--set", f"engine.silence_timeout_seconds={SILENCE_SECONDS}"),
        *("--set", "engine.min_restart_backoff_seconds=0.1"),
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def _ready(daemon: Daemon) -> None:
    daemon.wait_ready()


class Client(threading.Thread):
    """One request, and all its ends."""

    def __init__(self, daemon: Daemon, *content: Any, stream: bool, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.ends: list[str] = []
        self.text = ""
        self._client = daemon.client(timeout=90)
        self._fields: dict[str, Any] = {
            "model": "default",
            "messages": [user(*content)],
            "temperature": 0,
            "max_tokens": max_tokens,
            "stream": stream,
        }
        self.start()

    def run(self) -> None:
        try:
            answer = self._client.chat.completions.create(**self._fields)
            for part in answer if self._fields["stream"] else [answer]:
                choice = part.choices[0]
                self.text += (
                    choice.delta if self._fields["stream"] else choice.message
                ).content or ""
                if choice.finish_reason:
                    self.ends.append(choice.finish_reason)
        except openai.APIError as error:
            self.ends.append(str(error.code))


def start_crowd(daemon: Daemon) -> list[Client]:
    """Requests with endless answers, and requests with images in every earlier state."""
    seed = time.monotonic_ns() % 10**6
    shown = [noise(seed + n, (700, 500)) for n in range(16)]  # so that they come at once
    answers = [
        Client(daemon, "Go on", stream=stream, max_tokens=6000) for stream in (True, False) * 2
    ]
    wait_until(lambda: states(daemon)["decode"] == len(answers), 20, daemon.log)
    images = [
        Client(daemon, each, "What?", stream=n % 2 == 0, max_tokens=200)
        for n, each in enumerate(shown)
    ]
    wait_until(lambda: num_before_first_token(daemon) >= 3, 20, daemon.log)
    return answers + images


def states(daemon: Daemon) -> dict[str, int]:
    counted: dict[str, int] = daemon.status()["engine"]["stats"]["requests"]
    return counted


def num_before_first_token(daemon: Daemon) -> int:
    return sum(count for state, count in states(daemon).items() if state != "decode")


def known_answer(daemon: Daemon) -> str:
    client = Client(daemon, noise(1, (64, 64)), "What?", stream=False, max_tokens=8)
    client.join(60)
    assert client.ends == ["length"]
    return client.text


@pytest.mark.whole
@pytest.mark.parametrize(
    "death", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.whole)]
)
def test_real_engine_death_ends_each_request_once(daemon: Daemon, death: signal.Signals) -> None:
    expected, pid = known_answer(daemon), daemon.engine_pid()
    clients = start_crowd(daemon)
    os.kill(pid, death)
    for client in clients:
        client.join(60)
    ends = [client.ends for client in clients]
    assert all(len(codes) == 1 for codes in ends), ends
    # "engine_unavailable": the image was still being read here when the engine died
    assert {codes[0] for codes in ends} <= {"engine_died", "engine_unavailable", "length"}
    assert ends[:4] == [["engine_died"]] * 4
    assert ends[4:].count(["engine_died"]) >= 3
    daemon.wait_ready()
    assert daemon.engine_pid() != pid
    assert known_answer(daemon) == expected
    daemon.wait_idle()
    assert daemon.status()["requests"]["in_flight"] == 0
    assert daemon.status()["engine"]["quarantine"]["shapes"] == 0
