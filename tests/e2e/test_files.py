"""An agent sends each screenshot once: the bytes of its 25th turn, and its equal answers."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import random
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.support.daemons import SCRIPTED, Daemon, running_daemon, with_settings

pytestmark = pytest.mark.e2e

TURNS, ROUNDS = 25, 3
SIDE_PIXELS = 412
"""Noise of this size is a PNG of 0.5 MB."""
SEEN = {"max_pixels": 50_176}
"""The least that the model takes: encoding is not the subject."""
QUESTION, ANSWER = "What is on the screen now?", "Noise."


def screenshot(number: int) -> bytes:
    pixels = random.Random(number).randbytes(3 * SIDE_PIXELS**2)
    buffer = io.BytesIO()
    Image.frombytes("RGB", (SIDE_PIXELS, SIDE_PIXELS), pixels).save(buffer, "PNG")
    return buffer.getvalue()


class Agent:
    """A conversation in which each turn has a new screenshot, and a request has all turns."""

    def __init__(self, http: httpx.Client, *, by_name: bool) -> None:
        self._http = http
        self._by_name = by_name
        self._messages: list[dict[str, Any]] = []
        self.uploaded: list[int] = []
        """Bytes of each upload."""

    def see(self, picture: bytes) -> None:
        """Begin a turn with a screenshot."""
        url = self._name(picture) if self._by_name else _data_url(picture)
        part = {"type": "image_url", "image_url": {"url": url}}
        text = {"type": "text", "text": QUESTION}
        self._messages.append({"role": "user", "content": [part, text]})

    def hear(self, answer: str) -> None:
        self._messages.append({"role": "assistant", "content": answer})

    def ask(self) -> tuple[str, int, float]:
        """The answer to the conversation, the bytes of the request, and its seconds."""
        fields = {"model": "demo", "max_tokens": 4, "temperature": 0, "mm_processor_kwargs": SEEN}
        body = json.dumps({**fields, "messages": self._messages}).encode()
        began = time.monotonic()
        answer = self._http.post(
            "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )
        seconds = time.monotonic() - began
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"]), len(body), seconds

    def _name(self, picture: bytes) -> str:
        name = f"sha256:{hashlib.sha256(picture).hexdigest()}"
        if self._http.head(f"/v1/media/{name}").status_code == 404:
            assert self._http.put("/v1/media", content=picture).json()["id"] == name
            self.uploaded.append(len(picture))
        return name


def _data_url(picture: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def test_agents_25th_turn_sends_no_earlier_screenshot_again(daemon: Daemon) -> None:
    pictures = [screenshot(number) for number in range(TURNS)]
    with httpx.Client(base_url=daemon.url, timeout=240) as http:
        sending, naming = agents = Agent(http, by_name=False), Agent(http, by_name=True)
        for number, picture in enumerate(pictures):
            for agent in agents:
                if number:
                    agent.hear(ANSWER)
                agent.see(picture)
        said, _, _ = naming.ask()  # from here on, the engine has everything in its caches
        rounds = [(sending.ask(), naming.ask()) for _ in range(ROUNDS)]
    assert {answer for asked in rounds for answer, _, _ in asked} == {said}
    (_, sent_bytes, _), (_, named_bytes, _) = rounds[-1]
    assert sent_bytes > 12_000_000
    assert named_bytes < 100_000
    assert naming.uploaded == [len(picture) for picture in pictures]
    sent_seconds, named_seconds = (
        statistics.median(seconds for _, _, seconds in asked) for asked in zip(*rounds, strict=True)
    )
    print(
        f"\nturn {TURNS}: {sent_bytes:,} bytes as base64; {named_bytes:,} by name, and once "
        f"{naming.uploaded[-1]:,} of its own screenshot\nif all is cached, median of {ROUNDS}: "
        f"{sent_seconds:.2f} s as base64, {named_seconds:.2f} s by name"
    )


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_kept_files_survive_end_of_daemon(tmp_path: Path, ending: signal.Signals) -> None:
    settings = with_settings(f"files.folder={tmp_path / 'files'}", "engine.openblas=off")
    picture = screenshot(0)
    name = f"sha256:{hashlib.sha256(picture).hexdigest()}"
    with running_daemon(tmp_path, *settings, program=SCRIPTED) as first:
        assert httpx.put(f"{first.url}/v1/media", content=picture).status_code == 200
        first.process.send_signal(ending)
        first.process.wait(30)
    with running_daemon(tmp_path, *settings, program=SCRIPTED) as second:
        assert httpx.get(f"{second.url}/v1/media/{name}").content == picture
