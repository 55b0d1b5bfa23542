"""The health check of containers finds the daemon of a process by what that was started with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.daemons import SCRIPTED, running_daemon

pytestmark = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")


def check(pid: int, **variables: str) -> int:
    command = [sys.executable, "-P", "-m", "vlm_server.cli.ready", str(pid)]
    return subprocess.run(command, env=os.environ | variables, check=False, timeout=60).returncode


def check_without_port(**variables: str) -> int:
    """The check of a process that has no port in its arguments."""
    waiting = [sys.executable, "-c", "input()", "serve"]
    with subprocess.Popen(waiting, stdin=subprocess.PIPE) as process:
        code = check(process.pid, **variables)
        process.communicate(b"\n")
    return code


def test_ready_check_asks_port_of_arguments_or_environment(tmp_path: Path) -> None:
    keys = ("--set", "server.api_keys=a-long-key")
    with running_daemon(tmp_path, *keys, api_key="a-long-key", program=SCRIPTED) as daemon:
        assert check(daemon.process.pid) == 0
        assert check_without_port(VLM_SERVER_SERVER_PORT=str(daemon.port)) == 0
    assert check_without_port(VLM_SERVER_SERVER_PORT=str(daemon.port)) == 1
