"""The program at a real terminal (a pty): its output, and Ctrl-C."""

from __future__ import annotations

import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.hub.fixtures import hub
from tests.hub.server import Hub, add
from tests.support.child_pids import children_of
from tests.support.daemons import SCRIPTED, Daemon, with_settings
from tests.support.images import one_shape
from tests.support.terminal import COLUMNS, SECONDS, session
from tests.unit.cli import stalling
from vlm_server.models import EMBEDDED

__all__ = ["hub"]

ADDRESS = re.compile(r"API +(http://127\.0\.0\.1:\d+/v1)")
pytestmark = pytest.mark.e2e


def test_serve_prints_little_and_stops_at_ctrl_c() -> None:
    with session("serve", "--port", "0", program=SCRIPTED) as serve:
        serve.wait_for("page")
        assert "demo" in serve.plain
        serve.wait_for("Ctrl-C stops the daemon.")
        assert ADDRESS.search(serve.plain)
        assert "loading the weights" in serve.plain
        command = next(line for line in serve.plain.split("\n") if "vlm-server ask" in line)
        assert "--url http://127.0.0.1:" in command
        assert " INFO " not in serve.plain
        assert "curl" not in serve.plain
        assert serve.plain.count("demo is a toy that knows simple drawings.") == 1
        serve.type("\x03")
        serve.wait_for("Stopping.")
        serve.wait_for("Stopped.")
        assert serve.ended() == 0
    assert serve.shown.count("\x1b[?25l") == serve.shown.count("\x1b[?25h")  # the cursor is back


def test_log_of_start_in_file_is_short_and_names_page(daemon: Daemon) -> None:
    start, ready, _ = daemon.log.read_text().partition("Ready: ")
    assert ready
    assert " engine INFO " not in start
    assert len(start.splitlines()) <= 6, start
    page = f"http://127.0.0.1:{daemon.port}"
    assert f"Ready: demo is served at {page}/v1, and its page at {page}, with " in (
        daemon.log.read_text()
    )


@pytest.mark.parametrize("is_patient", [True, False])
def test_ctrl_c_finishes_requests_and_second_one_stops_at_once(is_patient: bool) -> None:
    settings = with_settings(f"server.drain_timeout_seconds={1 if is_patient else 60}")
    with session("serve", "--port", "0", *settings, program=SCRIPTED) as serve:
        serve.wait_for("Ctrl-C stops the daemon.")
        match = ADDRESS.search(serve.plain)
        assert match
        body = {"model": "demo", "messages": [{"role": "user", "content": "accept wait"}]}
        with ThreadPoolExecutor() as pool:
            asking = pool.submit(httpx.post, f"{match[1]}/chat/completions", json=body)
            while not httpx.get(f"{match[1]}/status").json()["requests"]["list"]:
                time.sleep(0.05)
            serve.type("\x03")
            serve.wait_for("Finishing 1 request, for at most ")
            if not is_patient:
                serve.type("\x03")
            assert serve.ended() == (0 if is_patient else -signal.SIGINT)
            assert ("Stopped." in serve.plain) is is_patient
            assert isinstance(asking.exception(SECONDS), httpx.HTTPError) or is_patient


def test_ctrl_c_stops_serve_during_load() -> None:
    slow = with_settings("model.name=slow")
    with session("serve", "--port", "0", *slow, program=SCRIPTED, NO_COLOR="1") as serve:
        serve.wait_for("loading the weights")
        serve.type("\x03")
        assert serve.ended() == 0
        assert "Traceback" not in serve.shown
        assert "\x1b[1m" not in serve.shown


def test_serve_reports_oversized_model_in_one_line() -> None:
    with session("serve", "--port", "0", "--set", "memory.max_bytes=1000000") as serve:
        assert serve.ended() == 3
        assert serve.plain.count("do not fit") == 1
        assert sum("vlm-server: " in line for line in serve.plain.splitlines()) == 1


def test_ask_holds_conversation_at_prompt(daemon: Daemon, tmp_path: Path) -> None:
    """Ctrl-C at the prompt only empties the line."""
    image = tmp_path / "a picture.png"
    one_shape("circle", "red").save(image)
    with session("ask", "--url", f"{daemon.url}/v1", XDG_STATE_HOME=str(tmp_path)) as ask:
        ask.wait_until_seen("it sees pictures")
        ask.type(f"'{image}' What shape is this?\r")
        ask.wait_until_seen("a picture.png (")
        ask.wait_until_seen("circle")
        ask.wait_until_seen("context")
        ask.type("nonsense")
        ask.wait_until_seen("nonsense")
        ask.type("\x03")
        ask.wait_until_gone("nonsense")
        ask.type("What colour is it?\r")
        ask.wait_until_seen("red")
        ask.wait_until_seen("red\n\n>>>\n")
        ask.type("\x04")
        assert ask.ended() == 0
        assert "Traceback" not in ask.shown


@pytest.mark.parametrize(("stage", "is_heard"), [("prefill", False), ("decode", True)])
def test_ctrl_c_stops_answer_and_keeps_conversation(
    stage: str, is_heard: bool, tmp_path: Path
) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path)}
    with stalling.daemon(stage) as (url, reached), session("ask", "--url", url, **state) as ask:
        ask.wait_until_seen(">>>")
        ask.type("What?\r")
        assert reached.wait(SECONDS)
        ask.wait_until_seen("a red" if is_heard else "waiting for the answer")
        ask.type("\x03")
        ask.wait_until_seen("(stopped)")
        ask.type(f"/save {tmp_path}/kept.md\r")
        ask.wait_until_seen("nothing to save" if not is_heard else "saved in")
        ask.type("\x04")
        assert ask.ended() == 0
        assert "Traceback" not in ask.shown


def test_ctrl_c_ends_daemon_started_by_ask() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with session("ask", "--set", f"server.port={port}", "What?") as ask:
        ask.wait_for("Starting one for now")
        ask.wait_for("loading the weights")
        children = children_of(ask.process.pid)
        assert children
        ask.type("\x03")
        assert ask.ended() == -signal.SIGINT
        assert not any(Path(f"/proc/{child}").exists() for child in children)
        assert "Traceback" not in ask.shown


@pytest.mark.whole
def test_pull_shows_progress_and_is_resumable(hub: Hub) -> None:
    """Ctrl-C loses no downloaded bytes."""
    add(hub, "org/model", {path.name: path.read_bytes() for path in EMBEDDED.iterdir()})
    hub.seconds_per_mib = 0.4
    with session("pull", "org/model") as pull:
        pull.wait_for("downloading model.saf")
        pull.wait_for("MB of 15 MB")
        pull.type("\x03")
        assert pull.ended() == -signal.SIGINT
        assert "goes on from there" in pull.plain
    assert max(map(len, pull.plain.replace("\r", "\n").split("\n"))) <= 2 * COLUMNS
