"""Starts that can't succeed end with one message and a status that says whether to retry."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemons import (
    SCRIPTED,
    Daemon,
    copied,
    running_daemon,
    wait_until,
    with_settings,
)
from tests.unit.runner.loading.test_weights import GIB, sparse

END_SECONDS = 60.0
MODEL_UNUSABLE, NOT_AVAILABLE = 3, 75


def end_of(daemon: Daemon) -> tuple[int, str]:
    """The exit status and the last log line of a daemon that does not get ready."""
    status = daemon.process.wait(END_SECONDS)
    return status, daemon.log.read_text().strip().splitlines()[-1]


def test_oversized_weights_are_refused_by_their_headers(tmp_path: Path) -> None:
    folder = copied("qwen3_vl", tmp_path / "model")
    sparse(folder / "model-2.safetensors", more=("BF16", [8192 * GIB // 2], 8192 * GIB))
    started = time.monotonic()
    with running_daemon(tmp_path, "--model", str(folder), wait=False) as daemon:
        status, last = end_of(daemon)
    assert status == MODEL_UNUSABLE
    assert "the weights do not fit" in last
    assert "8.80 TB in its files" in last
    assert "restart" not in daemon.log.read_text()
    assert time.monotonic() - started < END_SECONDS


@pytest.mark.parametrize(
    ("limit_bytes", "reason"),
    [
        pytest.param(1 << 20, "the weights do not fit", marks=pytest.mark.whole),
        (31 << 20, "leaves no room for requests"),
    ],
)
def test_model_without_memory_for_prompt_stops_start(
    tmp_path: Path, limit_bytes: int, reason: str
) -> None:
    """The embedded model takes 29 MiB as float32, and 1,024 tokens some MiB more."""
    limit = ("--set", f"memory.max_bytes={limit_bytes}")
    with running_daemon(tmp_path, *limit, wait=False) as daemon:
        status, last = end_of(daemon)
    assert status == MODEL_UNUSABLE
    assert reason in last
    assert "memory.max_bytes" in last
    assert "Ready" not in daemon.log.read_text()


def test_engines_killed_while_loading_are_tried_three_times(
    tmp_path: Path,
) -> None:
    """A scripted engine that never finishes loading."""
    fast = with_settings("engine.min_restart_backoff_seconds=0.05", "model.name=slow")
    killed = list[int]()
    with running_daemon(tmp_path, *fast, wait=False, program=SCRIPTED) as daemon:
        deadline = time.monotonic() + END_SECONDS
        while daemon.process.poll() is None and time.monotonic() < deadline:
            pid = engine_of(daemon)
            if pid is not None and pid not in killed:
                killed.append(pid)
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        status, last = end_of(daemon)
    assert status == MODEL_UNUSABLE
    assert len(killed) == 3
    assert "3 engines in a row ended before they were ready" in last
    assert "memory" in last


def engine_of(daemon: Daemon) -> int | None:
    try:
        pid: Any = daemon.status()["engine"]["pid"]
    except (OSError, ValueError):
        return None
    return pid


def test_taken_port_ends_start_with_temporary_status(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ended = subprocess.run(
            [sys.executable, "-m", "vlm_server.cli", "serve", "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=END_SECONDS,
        )
    assert ended.returncode == NOT_AVAILABLE
    *_, last = ended.stderr.splitlines()
    assert last.startswith("vlm-server: can't listen on")
    assert "Traceback" not in ended.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has it")
def test_kernel_kills_engine_when_memory_runs_out(tmp_path: Path) -> None:
    def score(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    with running_daemon(tmp_path, wait=False) as daemon:
        wait_until(lambda: engine_of(daemon) is not None, END_SECONDS, daemon.log)
        pid = engine_of(daemon)
        assert pid is not None
        wait_until(lambda: score(pid) > score(daemon.process.pid), 10, daemon.log)
