"""`vlm-server doctor` as a user runs it, on sound and broken machines."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemons import SCRIPTED, Daemon, free_port, running_daemon, with_settings
from tests.support.whole_run import few_of
from vlm_server import __version__

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-m", "vlm_server.cli", "doctor"]


def run_doctor(
    *arguments: str, prefix: tuple[str, ...] = (), **environment: str
) -> tuple[int, dict[str, Any]]:
    """The exit code, and the findings by name."""
    done = subprocess.run(
        [*prefix, *PROGRAM, "--json", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.stdout, done.stderr.decode()
    return done.returncode, {found["check"]: found for found in json.loads(done.stdout)}


@pytest.fixture
def port() -> str:
    return f"server.port={free_port()}"


@pytest.mark.whole
def test_doctor_finds_no_problem_on_sound_machine(port: str) -> None:
    code, found = run_doctor("--set", port)
    assert (code, [finding for finding in found.values() if finding["level"] == "problem"]) == (
        0,
        [],
    )
    assert "'circle'" in found["self-test"]["text"]
    assert __version__ in found["versions"]["text"]
    assert "float32" in found["device"]["text"]
    page = (ROOT / "docs/doctor.md").read_text()
    assert [name for name in found if f"`{name}`" not in page] == []


@pytest.mark.whole
def test_doctor_prints_its_findings_as_text(port: str) -> None:
    done = subprocess.run(
        [*PROGRAM, "--no-self-test", "--set", port, "--set", "engine.openblas=off"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert lines[0].startswith("ok       machine: ")
    assert lines[-1] == "Everything is well." or lines[-1].endswith(("warning.", "warnings."))
    advised = [line for line in lines if line.startswith("         → ")]
    assert len(advised) == sum(line.startswith(("warning", "PROBLEM")) for line in lines)


@pytest.mark.whole
def test_doctor_finds_running_daemon_ready(keyed_daemon: Daemon, tmp_path: Path) -> None:
    config = tmp_path / "my.toml"
    config.write_text(f'[server]\napi_keys = ["{keyed_daemon.api_key}"]\n')
    config.chmod(0o600)
    code, found = run_doctor("--config", str(config), "--set", f"server.port={keyed_daemon.port}")
    assert (code, found["port"]["level"], found["daemon"]["text"]) == (
        0,
        "ok",
        "ready, 0 engine restarts",
    )
    assert found["daemon version"]["text"] == __version__
    assert found["self-test"]["text"].startswith("the running daemon answered 'circle'")


@pytest.mark.whole
def test_doctor_without_key_reports_running_daemon(tmp_path: Path, daemon: Daemon) -> None:
    code, found = run_doctor("--set", f"server.port={daemon.port}", "--no-self-test")
    assert (code, found["daemon"]["level"]) == (0, "ok")


@pytest.mark.whole
@pytest.mark.parametrize("tests_itself", few_of((False, True), (False,)))
def test_doctor_checks_machine_despite_broken_settings(tmp_path: Path, tests_itself: bool) -> None:
    config = tmp_path / "my.toml"
    config.write_text("[server]\nprot = 8001\n")
    code, found = run_doctor(
        "--config", str(config), *(() if tests_itself else ("--no-self-test",))
    )
    assert (code, found["settings"]["level"]) == (1, "problem")
    assert "did you mean `server.port`?" in found["settings"]["text"]
    assert found["device"]["level"] == "ok"
    if tests_itself:
        assert "'circle'" in found["self-test"]["text"]


@pytest.mark.whole
def test_doctor_does_not_hang_on_unreadable_settings_file(tmp_path: Path) -> None:
    config = tmp_path / "my.toml"
    os.mkfifo(config)  # whoever reads it waits for a writer, as on a disk that hangs
    code, found = run_doctor("--config", str(config), "--no-self-test")
    assert (code, found["settings"]["level"]) == (1, "problem")
    assert found["settings file"]["text"].endswith("is not a regular file")


def test_doctor_reports_mlx_that_cannot_be_imported(tmp_path: Path, port: str) -> None:
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx/__init__.py").write_text("")
    (tmp_path / "mlx/core.py").write_text("raise ImportError('libmlx.so is gone')\n")
    folders = f"{tmp_path}:{ROOT}"
    code, found = run_doctor(
        "--set", port, "--set", "engine.start_timeout_seconds=20", PYTHONPATH=folders
    )
    assert code == 1
    assert "libmlx.so is gone" in found["device"]["text"]
    assert found["self-test"]["level"] == "problem"
    assert found["disk for models"]["level"] in ("ok", "warning")


@pytest.mark.whole
def test_doctor_reports_hung_daemon_in_time(tmp_path: Path) -> None:
    openblas = with_settings("engine.openblas=off")
    with running_daemon(tmp_path, *openblas, program=SCRIPTED) as daemon:
        os.kill(daemon.process.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            code, found = run_doctor("--set", f"server.port={daemon.port}", "--no-self-test")
            seconds = time.monotonic() - began
        finally:
            os.kill(daemon.process.pid, signal.SIGCONT)
    assert (code, found["port"]["level"], found["daemon"]["level"]) == (1, "problem", "problem")
    assert f"process {daemon.process.pid}" in found["port"]["text"]
    assert seconds < 60


@pytest.mark.whole
def test_doctor_reports_another_program_on_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        number = other.getsockname()[1]
        code, found = run_doctor("--set", f"server.port={number}", "--no-self-test")
    assert code == 1
    assert f"process {os.getpid()}" in found["port"]["text"]


@pytest.fixture
def other_user() -> tuple[str, ...]:
    """The command prefix that runs a program as a user without name and rights, where allowed."""
    words = ("unshare", "--user", "--map-user=1234", "--map-group=1234")
    words += ("env", "-u", "XDG_CACHE_HOME", "-u", "XDG_CONFIG_HOME", "-u", "HF_HOME")
    if shutil.which("unshare") is None or subprocess.run([*words, "true"], check=False).returncode:
        pytest.skip("no other user can be had here")
    return words


@pytest.mark.whole
def test_doctor_reports_unwritable_home(
    tmp_path: Path, other_user: tuple[str, ...], port: str
) -> None:
    config = tmp_path / "my.toml"
    config.write_text("")
    config.chmod(0)
    home = tmp_path / "home"
    home.mkdir(mode=0o555)
    code, found = run_doctor("--set", port, prefix=other_user, HOME=str(home))
    assert code == 0
    assert found["state folder"]["level"] == found["disk for models"]["level"] == "warning"
    assert "'circle'" in found["self-test"]["text"]
    arguments = ("--config", str(config), "--no-self-test")
    code, found = run_doctor(*arguments, prefix=other_user, HOME=str(home))
    assert (code, found["settings"]["level"], found["settings file"]["level"]) == (
        1,
        "problem",
        "problem",
    )
