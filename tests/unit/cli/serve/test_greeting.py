"""`serve` greets a person with commands that can be pasted, and never shows a key."""

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
from vlm_server.cli.client.questions import red_circle_url
from vlm_server.cli.serve import greeting
from vlm_server.protocol import ModelFacts

URL = "http://127.0.0.1:8000/v1"


def words_of(command: str) -> list[str]:
    return shlex.split(command)


def body_of(command: str) -> dict[str, Any]:
    words = words_of(command)
    return dict(json.loads(words[words.index("-d") + 1]))


def test_example_request_is_one_curl_command_about_image() -> None:
    command = greeting.example_request(URL, "demo", with_key=False)
    assert words_of(command)[:2] == ["curl", f"{URL}/chat/completions"]
    assert "\n" not in command
    body = body_of(command)
    assert body["model"] == "demo"
    (message,) = body["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url", "text"]


def test_greetings_name_drafter() -> None:
    facts = ModelFacts(drafter="qwen3_5_mtp")
    assert "qwen3_5_mtp" in greeting.greeting(URL, "demo", settings.Settings(), facts)
    assert "qwen3_5_mtp" in greeting.invitation(URL, 2.0, settings.Settings(), Terminal(), facts)
    assert "drafter" not in greeting.greeting(URL, "demo", settings.Settings())


def test_example_request_never_shows_api_key() -> None:
    with_key = settings.Settings(server=settings.Server(api_keys=("a-secret-key",)))
    text = greeting.greeting(URL, "demo", with_key)
    assert "a-secret-key" not in text
    assert "Authorization: Bearer YOUR_KEY" in text
    assert "Authorization" not in greeting.greeting(URL, "demo", settings.Settings())


@pytest.mark.parametrize("colours", [True, False])
def test_greeting_on_terminal_suggests_ask_command(
    monkeypatch: pytest.MonkeyPatch, colours: bool
) -> None:
    """The command includes the address unless it is the default of `ask`."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "" if colours else "1")
    screen = Terminal()
    shown = greeting.invitation("http://127.0.0.1:9/v1", 2.0, settings.Settings(), screen)
    assert "vlm-server ask --url http://127.0.0.1:9/v1 picture.png" in shown
    assert ("\x1b[1m" in shown) is colours
    assert "--url" not in greeting.invitation(URL, 2.0, settings.Settings(), screen)


def test_greeting_in_clone_names_full_program_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    program = f"{sys.prefix}/bin/vlm-server ask picture.png"
    assert program in greeting.invitation(URL, 2.0, settings.Settings(), Terminal())


@pytest.mark.parametrize("colours", [True, False])
def test_first_line_of_serve_depends_on_terminal(
    monkeypatch: pytest.MonkeyPatch, colours: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "" if colours else "1")
    first = greeting.first_words(
        URL, "demo", Terminal(), {"server.port": "/my.toml", "log.level": "command line"}
    )
    assert "demo" in first
    assert "/my.toml" in first
    assert ("\x1b[1m" in first) is colours
    assert greeting.first_words(URL, "demo", io.StringIO(), {}) == f"Listening on {URL}"


def test_log_level_defaults_to_warning_on_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = settings.Settings()
    assert log.with_terminal_log(given, {}).log.level == "info"
    monkeypatch.setattr("sys.stderr", Terminal())
    assert log.with_terminal_log(given, {}).log.level == "warning"
    assert log.with_terminal_log(given, {"log.level": "command line"}).log.level == "info"


def test_example_image_is_small_red_circle_on_white() -> None:
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
def test_wildcard_host_url_uses_loopback_address(host: str, url: str) -> None:
    assert url_of(host, 80) == url


def test_startup_failure_is_logged_once_on_terminal(
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
