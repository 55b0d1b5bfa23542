"""The wheel by uv and pipx: installed to stay, and run from a cache, which no service may name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from scripts.release import questions
from scripts.release.artifacts import CheckFailed


def check(wheel: Path, folder: Path) -> None:
    """uv and pipx come into an environment of their own. Raises CheckFailed."""
    own = folder / "own"
    run({}, sys.executable, "-m", "venv", str(own))
    run({}, f"{own}/bin/pip", "install", "--quiet", "uv", "pipx")
    # Below no temporary folder, as on a user's machine: those are refused for what they are.
    home = Path.home() / f".vlm-server-release-check-{os.getpid()}"
    environment = {
        "UV_CACHE_DIR": f"{home}/uv-cache",
        "UV_TOOL_DIR": f"{home}/uv/tools",
        "UV_TOOL_BIN_DIR": f"{home}/uv/bin",
        "PIPX_HOME": f"{home}/pipx",
        "PIPX_BIN_DIR": f"{home}/pipx-bin",
    }
    package = f"{wheel.absolute()}[cpu]"
    service = ("service", "install", "--dry-run")
    (folder / "square.png").write_bytes(questions.picture())
    # A port on which no daemon listens: it starts one of its own.
    ask = ("ask", "--set", "server.port=9", f"{folder}/square.png", questions.QUESTION)
    try:
        said = run(environment, f"{own}/bin/uvx", "--from", package, "vlm-server", *service, code=1)
        expect("uvx", said, "uv tool install")
        words = (f"{own}/bin/uvx", "--from", package, "vlm-server", *ask)
        expect("uvx", run(environment, *words), questions.ANSWER)
        words = (f"{own}/bin/pipx", "run", "--spec", package, "vlm-server", *service)
        expect("pipx run", run(environment, *words, code=1), "pipx install")
        run(environment, f"{own}/bin/uv", "tool", "install", package)
        program = f"{home}/uv/tools/vlm-server/bin/vlm-server"
        expect("uv tool install", run(environment, f"{home}/uv/bin/vlm-server", *service), program)
        said = run(environment, f"{home}/uv/bin/vlm-server", *ask)
        expect("uv tool install", said, questions.ANSWER)
        run(environment, f"{own}/bin/pipx", "install", package)
        program = f"{home}/pipx/venvs/vlm-server/bin/vlm-server"
        expect("pipx install", run(environment, f"{home}/pipx-bin/vlm-server", *service), program)
        said = run(environment, f"{home}/pipx-bin/vlm-server", *ask)
        expect("pipx install", said, questions.ANSWER)
    finally:
        subprocess.run(["rm", "-rf", str(home)], check=False)


def expect(way: str, said: str, words: str) -> None:
    if words not in said:
        raise CheckFailed(f"by {way}, there is no {words!r} in what it says:\n{said}")
    print(f"{way}: it says {words!r}")


def run(environment: dict[str, str], *words: str, code: int = 0) -> str:
    """What it printed. Raises CheckFailed if it ends with another status than `code`."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        words, env={**inherited, **environment}, capture_output=True, text=True, timeout=600
    )
    if ended.returncode != code:
        raise CheckFailed(f"{words} ended with {ended.returncode}:\n{ended.stderr[-4000:]}")
    return ended.stdout + ended.stderr
