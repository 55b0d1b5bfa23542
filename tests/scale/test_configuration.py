"""Configuration files of gateways agree with the daemon's limits and with each other."""

from __future__ import annotations

import re
import shlex
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest

from scripts.scale_out import ARGUMENTS, ScaleOut, gateway_command
from vlm_server.settings import MIB, Limits

FOLDER = ARGUMENTS.parent


def options() -> dict[str, str]:
    """The gateway's options that have a value."""
    words = shlex.split(ARGUMENTS.read_text(), comments=True)
    return {name: value for name, value in pairwise(words) if name[:2] == "--" != value[:2]}


def test_gateways_accept_and_buffer_largest_bodies() -> None:
    most = Limits().max_body_bytes
    assert int(options()["--max-payload-size"]) == most
    assert int(options()["--max-buffered-request-bytes"]) == most
    nginx = (FOLDER / "nginx.conf").read_text()
    assert f"client_max_body_size {most // MIB}m;" in nginx


def test_gateways_retry_requests_more_often_than_workers_fail() -> None:
    """Otherwise a request would never reach another worker."""
    values = options()
    assert int(values["--retry-max-retries"]) > int(values["--cb-failure-threshold"])


def test_scale_out_reports_daemon_that_ends_at_start(tmp_path: Path) -> None:
    started = ScaleOut(tmp_path)
    started.start("daemon-0", [sys.executable, "-c", "import time; time.sleep(60)"])
    started.start("daemon-1", [sys.executable, "-c", "raise SystemExit('the port is taken')"])
    stopping = threading.Timer(20, started.stop.set)
    stopping.start()
    try:
        with pytest.raises(SystemExit, match="daemon-1 has ended with 1:\nthe port is taken"):
            started.wait_for(lambda: None)
    finally:
        stopping.cancel()
        started.end()


def test_gateways_listen_on_loopback_only() -> None:
    command = gateway_command("smg", 1, 2, ["http://127.0.0.1:3"], "demo")
    for name in ("--host", "--prometheus-host"):
        assert command[command.index(name) + 1] == "127.0.0.1"
    for file in ("nginx.conf", "haproxy.cfg"):
        listening = re.findall(r"^\s*(?:listen|bind)\s+(\S+?):", (FOLDER / file).read_text(), re.M)
        assert listening == ["127.0.0.1"]
