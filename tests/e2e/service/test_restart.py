"""A restart behind a socket that stays open fails no request."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.service.clients import asking_clients
from tests.e2e.service.inherited import Keeper, wait_for

pytestmark = pytest.mark.e2e


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    started = Keeper(tmp_path)
    yield started
    started.close()


def test_restart_under_load_fails_no_request(keeper: Keeper) -> None:
    """Like `systemctl restart`: SIGTERM, then another process for the same socket."""
    first = keeper.start()
    wait_for(first, "Ready: ")
    with keeper.running_at_end() as start, asking_clients(keeper.port) as record:
        record.wait_for_more()
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(30) == 0
        start()
        record.wait_for_more()
    assert record.failures == []


def test_sighup_restarts_process_without_failures(keeper: Keeper) -> None:
    with keeper.running("--reload") as daemon, asking_clients(keeper.port) as record:
        record.wait_for_more()
        engine = daemon.engine_pid()
        daemon.process.send_signal(signal.SIGHUP)
        wait_for(daemon, "Ready: ", times=2)
        record.wait_for_more()
        assert daemon.engine_pid() != engine
    assert record.failures == []
    assert "starting again" in daemon.log.read_text()


def test_changed_settings_restart_and_wrong_ones_are_refused(
    keeper: Keeper, tmp_path: Path
) -> None:
    config = tmp_path / "my.toml"
    config.write_text(f"[server]\nport = {keeper.port}\n")
    with keeper.running("--reload", "--config", str(config), port=None) as daemon:
        engine = daemon.engine_pid()
        config.write_text("[server]\nport = 'none'\n")
        wait_for(daemon, "the new settings are refused, the old ones stay in force: ")
        assert "`server.port`" in daemon.log.read_text()
        assert daemon.engine_pid() == engine
        config.write_text(f"[server]\nport = {keeper.port}\n[model]\naliases = ['other']\n")
        wait_for(daemon, "Ready: ", times=2)
        assert daemon.engine_pid() != engine
        assert "starting again: the settings have changed" in daemon.log.read_text()


def test_inherited_public_socket_needs_key(tmp_path: Path) -> None:
    """An inherited address is checked like one from the settings."""
    keeper = Keeper(tmp_path, host="0.0.0.0")
    daemon = keeper.start("--port", "1")
    assert daemon.process.wait(60) == 2
    assert "can be reached from other machines" in daemon.log.read_text()
    keys = tmp_path / "keys.toml"
    keys.touch(mode=0o600)
    keys.write_text('[me]\nkey = "a-key-that-is-long-enough"\n')
    with keeper.running("--set", f"server.api_key_file={keys}", port=1) as daemon:
        assert f"listening on 0.0.0.0:{keeper.port}" in daemon.log.read_text()
        assert daemon.get("/v1/models")[0] == 401
    keeper.close()


@pytest.mark.skipif(sys.platform != "linux", reason="systemd-socket-activate is Linux's")
def test_systemd_socket_serves_requests(tmp_path: Path) -> None:
    """By systemd-socket-activate, which speaks the manager's protocol."""
    tool = "systemd-socket-activate"
    try:
        subprocess.run([tool, "--version"], capture_output=True, check=True)
    except FileNotFoundError:
        pytest.skip(f"needs {tool}")
    keeper = Keeper(tmp_path)
    keeper.close()
    with keeper.activated(tool) as daemon:
        daemon.wait_ready()
        assert daemon.get("/v1/models")[0] == 200
