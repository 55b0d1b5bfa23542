"""What `serve` says to a person, and the request that can be pasted."""

from __future__ import annotations

import base64
import io
import json
import logging
import shlex
import sys
from typing import Any

import pytest
from PIL import Image

from tests.unit.cli.screen import Terminal
from vlm_server import settings
from vlm_server.cli import log
from vlm_server.cli.client.daemon import url_of
from vlm_server.cli.client.pictures import red_circle_url
from vlm_server.cli.serve import greeting

URL = "http://127.0.0.1:8000/v1"


def words_of(command: str) -> list[str]:
    return shlex.split(command)


def body_of(command: str) -> dict[str, Any]:
    words = words_of(command)
    return dict(json.loads(words[words.index("-d") + 1]))


def test_the_example_is_one_curl_command_with_a_question_about_a_picture() -> None:
    command = greeting.example_request(URL, "demo", with_key=False)
    assert words_of(command)[:2] == ["curl", f"{URL}/chat/completions"]
    assert "\n" not in command
    body = body_of(command)
    assert body["model"] == "demo"
    (message,) = body["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url", "text"]


def test_the_example_never_shows_a_key() -> None:
    with_key = settings.Settings(server=settings.Server(api_keys=("a-secret-key",)))
    text = greeting.greeting(URL, "demo", with_key)
    assert "a-secret-key" not in text
    assert "Authorization: Bearer YOUR_KEY" in text
    assert "Authorization" not in greeting.greeting(URL, "demo", settings.Settings())


@pytest.mark.parametrize("colours", [True, False])
def test_a_person_gets_a_line_that_can_be_pasted(
    monkeypatch: pytest.MonkeyPatch, colours: bool
) -> None:
    """With the address, where it is not the one that `ask` asks anyway."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "" if colours else "1")
    screen = Terminal()
    shown = greeting.invitation("http://127.0.0.1:9/v1", 2.0, settings.Settings(), screen)
    assert "vlm-server ask --url http://127.0.0.1:9/v1 picture.png" in shown
    assert ("\x1b[1m" in shown) is colours
    assert "--url" not in greeting.invitation(URL, 2.0, settings.Settings(), screen)
    monkeypatch.setenv("PATH", "/nowhere")  # in a clone
    program = f"{sys.prefix}/bin/vlm-server ask picture.png"
    assert program in greeting.invitation(URL, 2.0, settings.Settings(), screen)
    first = greeting.first_words(URL, "demo", screen)
    assert "demo" in first
    assert ("\x1b[1m" in first) is colours
    assert greeting.first_words(URL, "demo", io.StringIO()) == f"Listening on {URL}"


def test_the_log_is_quieter_for_a_person_who_did_not_choose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = settings.Settings()
    assert log.with_terminal_log(given, {}).log.level == "info"
    monkeypatch.setattr("sys.stderr", Terminal())
    assert log.with_terminal_log(given, {}).log.level == "warning"
    assert log.with_terminal_log(given, {"log.level": "command line"}).log.level == "info"


def test_the_picture_is_a_small_red_circle_on_white() -> None:
    kind, _, data = red_circle_url().partition(",")
    assert kind == "data:image/png;base64"
    assert len(data) <= 400
    image = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
    red, white = (220, 30, 30), (255, 255, 255)
    assert image.getpixel((48, 48)) == red
    corners = [(0, 0), (95, 0), (0, 95), (95, 95), (20, 20)]
    assert {image.getpixel(corner) for corner in corners} == {white}


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


def test_what_ends_serve_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.stderr", Terminal())
    logger = logging.getLogger("vlm_server.supervisor.supervisor")
    log.with_terminal_log(settings.Settings(), {})
    logger.error("the model can't be loaded")
    logger.warning("the engine ended")
    log.has_started()
    logger.error("the model can't be loaded again")
    assert caplog.messages == ["the engine ended", "the model can't be loaded again"]
