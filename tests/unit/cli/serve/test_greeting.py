"""`serve` greets a person with commands that can be pasted, and never shows a key."""

from __future__ import annotations

import io
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.screen import Terminal
from vlm_server import settings
from vlm_server.cli import log
from vlm_server.cli.client.daemon import url_of
from vlm_server.cli.serve import greeting
from vlm_server.protocol import MemoryStats, ModelFacts, Stats
from vlm_server.supervisor.engine_process.client import EngineStatus

URL = "http://127.0.0.1:8000/v1"


def status_of(**facts: Any) -> EngineStatus:
    return EngineStatus("ready", "demo", model_facts=ModelFacts(**facts))


def ready(url: str = URL, out: io.StringIO | None = None, path: str = "/m", **facts: Any) -> str:
    given = settings.Settings(model=settings.ModelSettings(path=path))
    return greeting.ready(url, 2.0, given, status_of(**facts), out or Terminal())


def test_greetings_name_drafter() -> None:
    for out in (io.StringIO(), Terminal()):
        assert "qwen3_5_mtp" in ready(out=out, drafter="qwen3_5_mtp")
        assert "drafted" not in ready(out=out)


def test_greetings_name_weights_and_memory_limit() -> None:
    memory = MemoryStats(0, 0, 0, 10**9, 0, 0, 0, {}, 0.0)
    status = EngineStatus("ready", "demo", model_facts=ModelFacts(size_bytes=31_000_000))
    status = replace(status, stats=Stats({}, 0, {}, memory, 0))
    for out in (io.StringIO(), Terminal()):
        text = greeting.ready(URL, 2.0, settings.Settings(), status, out)
        assert "with 30 MiB of weights and a limit of 954 MiB of memory." in text.split("\n")[0]


def test_greeting_never_shows_api_key() -> None:
    with_key = settings.Settings(server=settings.Server(api_keys=("a-secret-key",)))
    text = greeting.ready(URL, 2.0, with_key, status_of(), Terminal())
    assert "a-secret-key" not in text
    assert "--api-key-file FILE" in text
    assert "--api-key-file" not in ready()


def test_greeting_suggests_question_that_model_can_answer() -> None:
    assert 'picture.png "What is this?"' in ready(capabilities=("completion", "vision"))
    assert '"Why is the sky blue?"' in ready(capabilities=("completion",))
    assert "vlm-server ask" not in ready(capabilities=("embedding",))


def test_greeting_of_embedded_model_names_picture_that_exists() -> None:
    text = ready(path="", capabilities=("completion", "vision"))
    [command] = [line for line in text.splitlines() if "Where is the star?" in line]
    picture = Path(command.partition(" ask ")[2].split()[0])
    assert picture.is_absolute()
    assert picture.is_file()


def test_greeting_of_program_is_one_line() -> None:
    assert (
        ready(out=io.StringIO())
        == f"Ready: demo is served at {URL}, and its page at http://127.0.0.1:8000."
    )


def test_words_after_ctrl_c_count_requests() -> None:
    assert greeting.stopping(0, 20) == "Stopping."
    finishing = "Finishing 1 request, for at most 20 s; press Ctrl-C again to stop now."
    assert greeting.stopping(1, 20) == finishing
    assert greeting.stopping(2, 0).startswith("Finishing 2 requests, quickly; ")


@pytest.mark.parametrize("colours", [True, False])
def test_greeting_on_terminal_suggests_ask_command(
    monkeypatch: pytest.MonkeyPatch, colours: bool
) -> None:
    """The command includes the address unless it is the default of `ask`."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "" if colours else "1")
    screen = Terminal()
    shown = ready("http://127.0.0.1:9/v1", screen)
    assert "vlm-server ask --url http://127.0.0.1:9/v1 picture.png" in shown
    assert ("\x1b[1m" in shown) is colours
    assert "--url" not in ready(out=screen)


def test_greeting_in_clone_names_full_program_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    program = f"{sys.prefix}/bin/vlm-server ask picture.png"
    assert program in ready()


@pytest.mark.parametrize("colours", [True, False])
def test_first_line_of_serve_depends_on_terminal(
    monkeypatch: pytest.MonkeyPatch, colours: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "" if colours else "1")
    given, names = settings.Settings(), ("demo", "other")
    sources = {"server.port": "/my.toml", "log.level": "command line"}
    first = greeting.first_words(URL, names, given, Terminal(), sources)
    assert "demo" in first
    assert "and other when asked for" in first
    assert "/my.toml" in first
    assert ("\x1b[1m" in first) is colours
    assert first.count("vlm-server serve --model mlx-community/") == 1
    real = settings.Settings(model=settings.ModelSettings(path="/m"))
    assert "toy" not in greeting.first_words(URL, names, real, Terminal(), sources)
    assert greeting.first_words(URL, names, given, io.StringIO(), {}) == f"Listening on {URL}"


def test_log_level_defaults_to_warning_on_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = settings.Settings()
    assert log.with_terminal_log(given, {}).log.level == "info"
    monkeypatch.setattr("sys.stderr", Terminal())
    assert log.with_terminal_log(given, {}).log.level == "warning"
    assert log.with_terminal_log(given, {"log.level": "command line"}).log.level == "info"


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
