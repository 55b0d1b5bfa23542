"""The service under a real systemd manager, from installation to removal."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.service.clients import asking_clients
from tests.e2e.service.systemd_home import SystemdHome, missing, systemd_home
from tests.support.daemons import free_port, wait_until

pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[SystemdHome]:
    with systemd_home(tmp_path) as made:
        yield made


def run_service(result: subprocess.CompletedProcess[str], code: int = 0) -> str:
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout


def status(home: SystemdHome, code: int = 0) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(run_service(home.service("status", "--json"), code))
    return shown


def test_service_is_installed_restarted_and_removed(home: SystemdHome) -> None:
    port = free_port()
    config = home.home / "my.toml"
    config.write_text(f"[server]\nport = {port}\n")
    installed = run_service(home.service("install", "--config", str(config)))
    assert "answered 'circle'" in installed.lower()
    shown = status(home)
    assert (shown["state"], shown["health"]) == ("running", "ready")
    assert shown["address"] == f"http://127.0.0.1:{port}/v1"
    assert "Ready: demo" in run_service(home.service("logs", "-n", "100"))

    with asking_clients(port) as record:
        record.wait_for_more()
        run_service(home.service("restart"))
        record.wait_for_more()
        restarted = status(home)
        config.write_text(f"[server]\nport = {port}\n[model]\naliases = ['other']\n")
        run_service(home.run("systemctl", "--user", "reload", "vlm-server.service"))
        log = home.home / "systemd.log"
        wait_until(lambda: log_of(home).count("Ready: demo") == 3, 120, log)
        record.wait_for_more()
    assert record.failures == []
    assert restarted["pid"] != shown["pid"]
    assert status(home)["pid"] == restarted["pid"], "a reload keeps the process"

    run_service(home.service("uninstall"))
    assert [path for path in home.units.rglob("*") if not path.is_dir()] == []
    run_service(home.service("status"), 4)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_service_that_does_not_answer_is_not_installed(home: SystemdHome) -> None:
    port, other = free_port(), free_port()
    broken = home.home / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "qwen2_vl"}')
    (broken / "model.safetensors").write_text("nothing")
    wrong = ("--set", f"server.port={other}", "--model", str(broken))

    refused = home.service("install", *wrong)
    assert refused.returncode == 1
    assert "Nothing was installed." in refused.stderr
    assert "The last lines of its log:" in refused.stderr
    assert "can't be loaded" in refused.stderr
    run_service(home.service("status"), 4)

    run_service(home.service("install", "--set", f"server.port={port}"))
    refused = home.service("install", *wrong)
    assert refused.returncode == 1
    assert "The service that was installed before runs again." in refused.stderr
    assert status_once_ready(home)["address"] == f"http://127.0.0.1:{port}/v1"

    run_service(home.service("install", "--no-wait", *wrong))
    state = ("systemctl", "--user", "is-active", "vlm-server.service", "vlm-server.socket")
    log = home.home / "systemd.log"
    wait_until(lambda: home.run(*state).stdout.split() == ["failed", "inactive"], 90, log)
    assert status(home, 3)["last_exit"].startswith("3 ")
    with pytest.raises(ConnectionRefusedError):  # or each client would have it started again
        socket.create_connection(("127.0.0.1", other))


def test_concurrent_installs_exclude_each_other_and_crashes_restart(home: SystemdHome) -> None:
    port = free_port()
    words = (*home.program, "service", "install", "--set", f"server.port={port}")
    first, second = (
        subprocess.Popen(
            home.command(*words), env=home.environment, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    )
    outputs = [process.communicate(timeout=180)[1] for process in (first, second)]
    assert sorted((first.returncode, second.returncode)) == [0, 1]
    assert any("is running: try again" in text for text in outputs)
    before = status(home)
    home.run("kill", f"-{signal.SIGKILL.value}", str(before["pid"]))
    # The socket is still there: this connection is served by the next process.
    with socket.create_connection(("127.0.0.1", port), timeout=120) as waiting:
        waiting.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert waiting.recv(15) == b"HTTP/1.1 200 OK"
    assert status_once_ready(home)["pid"] != before["pid"]
    assert "started again 1 times" in status(home)["last_exit"]
    run_service(home.service("stop"))
    assert status(home, 3)["state"] == "stopped"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def log_of(home: SystemdHome) -> str:
    return run_service(home.service("logs", "-n", "1000"))


def status_once_ready(home: SystemdHome) -> dict[str, Any]:
    log = home.home / "systemd.log"
    wait_until(lambda: home.service("status").returncode == 0, 120, log)
    return status(home)
