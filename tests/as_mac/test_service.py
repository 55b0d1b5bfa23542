"""The service's whole life under something like macOS and its launchd."""

from __future__ import annotations

import json
import os
import plistlib
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.as_mac.home import MacHome, mac_home, missing
from tests.e2e.service.clients import asking_clients
from tests.support.daemons import free_port, wait_until

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[MacHome]:
    with mac_home(tmp_path) as made:
        yield made


def run_service(home: MacHome, *words: str, code: int = 0) -> str:
    result = home.run("service", *words)
    log = home.log.read_text() if home.log.exists() else ""
    assert result.returncode == code, result.stdout + result.stderr + log
    return result.stdout


def status(home: MacHome, code: int = 0) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(run_service(home, "status", "--json", code=code))
    return shown


def engine_pid(port: int) -> int:
    status_document = httpx.get(f"http://127.0.0.1:{port}/v1/status", trust_env=False).json()
    return int(status_document["engine"]["pid"] or 0)


def test_launchd_service_survives_restart_reload_and_kills(home: MacHome) -> None:
    port = free_port()
    config = home.home / "my.toml"
    config.write_text(f"[server]\nport = {port}\n")

    assert "answered 'text text" in run_service(home, "install", "--config", str(config))
    words = plistlib.loads(home.plist.read_bytes())["ProgramArguments"]
    assert words[0] == str(home.home / "clone/.venv/bin/vlm-server")
    first = status(home)
    assert (first["state"], first["health"]) == ("running", "ready")
    assert first["pid"] == home.launchd.pid()

    with asking_clients(port) as record:  # a restart, and new settings: nobody is refused
        record.wait_for_more(4)
        run_service(home, "restart")
        record.wait_for_more(4)
        second = home.launchd.pid()
        config.write_text(f"[server]\nport = {port}\n[model]\naliases = ['other']\n")
        wait_until(lambda: home.log.read_text().count("Ready: ") == 3, 120, home.log)
        record.wait_for_more(4)
    assert record.failures == []
    assert second != first["pid"]
    assert home.launchd.pid() == second, "new settings keep the process"

    engine = engine_pid(port)
    os.kill(engine, signal.SIGKILL)
    wait_until(lambda: engine_pid(port) not in (0, engine), 60, home.log)
    os.kill(second, signal.SIGKILL)  # who connects meanwhile waits
    with socket.create_connection(("127.0.0.1", port), timeout=120) as waiting:
        waiting.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert waiting.recv(15) == b"HTTP/1.1 200 OK"
    assert home.launchd.pid() != second

    run_service(home, "uninstall")
    assert not home.plist.exists()
    run_service(home, "status", code=4)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_launchd_service_installs_without_gui_login(tmp_path: Path) -> None:
    with mac_home(tmp_path, has_screen=False) as home:
        port = free_port()
        run_service(home, "install", "--set", f"server.port={port}")
        assert status(home)["health"] == "ready"
        loaded = [words for words in home.launchd.commands if words[0] == "bootstrap"]
        assert loaded == [["bootstrap", f"user/{os.getuid()}", str(home.plist)]]
        run_service(home, "uninstall")
