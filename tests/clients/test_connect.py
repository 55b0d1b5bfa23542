"""Programs that `vlm-server connect` has configured ask the real daemon, with its API key.

Those on PATH are tested: `npm install -g @anthropic-ai/claude-code @openai/codex opencode-ai
@continuedev/cli`. The embedded model's context holds their prompts without their tools.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.clients.screen import COLOUR, URL
from tests.support.daemons import USER_KEY, Daemon
from vlm_server.cli.connect.service import KEY_VARIABLE
from vlm_server.cli.main import main

_SECONDS = 120


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without settings, with a picture."""
    for name in ("CLAUDE_CONFIG_DIR", "CODEX_HOME", "CONTINUE_GLOBAL_DIR", "OPENCODE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    for name in ("CONFIG", "STATE", "DATA", "CACHE"):
        monkeypatch.delenv(f"XDG_{name}_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "screen.png").write_bytes(base64.b64decode(URL.partition(",")[2]))
    return tmp_path


def connect(name: str, daemon: Daemon) -> None:
    """Connect the client `name`, which is skipped if its program is not here."""
    assert main(["connect", name, "--yes", "--url", daemon.url, "--api-key", USER_KEY]) == 0


def output_of(program: str, *words: str, home: Path, stdin: str = "") -> str:
    ended = subprocess.run(
        [program, *words],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        cwd=home,
        env={**os.environ, KEY_VARIABLE: USER_KEY},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not on PATH")


@needs("claude")
def test_connected_claude_code_answers_image(daemon: Daemon, home: Path) -> None:
    connect("claude-code", daemon)
    source = {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}
    content = [{"type": "image", "source": source}, {"type": "text", "text": COLOUR}]
    message = {"type": "user", "message": {"role": "user", "content": content}}
    streams = ["--input-format", "stream-json", "--output-format", "stream-json", "--verbose"]
    words = ["-p", *streams, "--system-prompt", "Answer.", "--tools", ""]
    lines = output_of("claude", *words, home=home, stdin=f"{json.dumps(message)}\n").splitlines()
    result = json.loads(lines[-1])
    assert result["result"].strip() == "red"
    assert result["modelUsage"]["demo"]["contextWindow"] == 8192


@needs("codex")
def test_connected_codex_answers_image(daemon: Daemon, home: Path) -> None:
    connect("codex", daemon)
    instructions = home / "instructions.md"
    instructions.write_text("Answer.")
    settings: Sequence[str] = (
        f"model_instructions_file={instructions}",
        "features.shell_tool=false",
    )
    flags = [word for setting in settings for word in ("-c", setting)]
    words = ["exec", "--skip-git-repo-check", *flags, "-i", f"{home}/screen.png", "--", COLOUR]
    assert output_of("codex", *words, home=home).split() == ["red"]


@needs("opencode")
def test_connected_opencode_answers_image(daemon: Daemon, home: Path) -> None:
    """An agent without tools is what the user had before."""
    file = home / ".config/opencode/opencode.json"
    file.parent.mkdir(parents=True)
    agent = {"prompt": "Answer.", "tools": {"*": False}, "mode": "primary"}
    file.write_text(json.dumps({"agent": {"short": agent}}))
    connect("opencode", daemon)
    words = ["run", "--agent", "short", "-f", f"{home}/screen.png", "--", COLOUR]
    assert "red" in output_of("opencode", *words, home=home)


@needs("cn")
def test_connected_continue_answers(daemon: Daemon, home: Path) -> None:
    connect("continue", daemon)
    (home / ".continue/.env").write_text(f"{KEY_VARIABLE}={USER_KEY}\n")
    assert output_of("cn", "-p", "What can you do?", home=home).strip()
