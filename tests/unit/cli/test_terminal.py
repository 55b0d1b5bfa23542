"""What is shown while loading, and the request that a person can paste."""

from __future__ import annotations

import base64
import io
import json
import logging
import shlex
from typing import Any

import pytest
from PIL import Image

from vlm_server import settings
from vlm_server.cli import terminal
from vlm_server.cli.serve import url_of

URL = "http://127.0.0.1:8000/v1"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def words_of(command: str) -> list[str]:
    return shlex.split(command)


def body_of(command: str) -> dict[str, Any]:
    words = words_of(command)
    return dict(json.loads(words[words.index("-d") + 1]))


def test_the_example_is_one_curl_command_with_a_question_about_a_picture() -> None:
    command = terminal.example_request(URL, "demo", with_key=False)
    assert words_of(command)[:2] == ["curl", f"{URL}/chat/completions"]
    assert "\n" not in command
    body = body_of(command)
    assert body["model"] == "demo"
    (message,) = body["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url", "text"]


def test_the_example_never_shows_a_key() -> None:
    with_key = settings.Settings(server=settings.Server(api_keys=("a-secret-key",)))
    text = terminal.greeting(URL, "demo", with_key)
    assert "a-secret-key" not in text
    assert "Authorization: Bearer YOUR_KEY" in text
    assert "Authorization" not in terminal.greeting(URL, "demo", settings.Settings())


def test_the_picture_is_a_small_red_circle_on_white() -> None:
    kind, _, data = terminal.red_circle_url().partition(",")
    assert kind == "data:image/png;base64"
    assert len(data) <= 400
    image = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
    red, white = (220, 30, 30), (255, 255, 255)
    assert image.getpixel((48, 48)) == red
    corners = [(0, 0), (95, 0), (0, 95), (95, 95), (20, 20)]
    assert {image.getpixel(corner) for corner in corners} == {white}


def test_progress_is_one_line_on_a_terminal() -> None:
    stream = Terminal()
    progress = terminal.ProgressLine(stream)
    progress.show("loading", 0.1)
    progress.show("warming up", 0.7)
    progress.clear()
    assert "\n" not in stream.getvalue()
    assert "warming up (70%)" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_progress_is_log_lines_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    progress = terminal.ProgressLine(stream)
    with caplog.at_level(logging.INFO):
        progress.show("loading", 0.1)
        progress.clear()
    assert stream.getvalue() == ""
    assert [record.getMessage() for record in caplog.records] == ["loading (10%)"]


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80/v1"),
        ("localhost", "http://localhost:80/v1"),
        ("::1", "http://[::1]:80/v1"),
        ("0.0.0.0", "http://127.0.0.1:80/v1"),
        ("::", "http://[::1]:80/v1"),
    ],
)
def test_the_address_can_be_opened_on_this_machine(host: str, url: str) -> None:
    assert url_of(host, 80) == url


def test_a_download_has_few_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    line = terminal.ProgressLine(io.StringIO())
    with caplog.at_level(logging.INFO):
        for number in range(1001):
            line.show(f"downloading {number}", number / 1000)
        line.show("loading the weights", 0.1)
    assert 20 <= len(caplog.messages) <= 22
    assert caplog.messages[-1] == "loading the weights (10%)"
