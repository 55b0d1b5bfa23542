"""The service runs under launchd without a GUI login, after being disabled, and when throttled."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.as_mac.launchd import SOFT_FILES, Launchd, launchd
from tests.support.daemons import LOOK_SECONDS, free_port
from vlm_server.cli.exit_codes import CommandFailed
from vlm_server.cli.service import status
from vlm_server.cli.service.launchd import LABEL
from vlm_server.cli.service.launchd import Launchd as Service
from vlm_server.cli.service.manager import ServiceCommand, ServicePhase
from vlm_server.cli.service.status import wait_for_answer
from vlm_server.settings import EngineSettings, Server, Settings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS has a real one")

GUI, USER = f"gui/{os.getuid()}/{LABEL}", f"user/{os.getuid()}/{LABEL}"
WAITS = "trap 'kill $!; exit 0' TERM; sleep 1000 & touch up; wait"
"""A program that ends with 0 on SIGTERM, as the daemon does."""


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits for a daemon's answer, as none answers here."""
    monkeypatch.setattr(status, "_LOOK_SECONDS", 0.2)


class InstalledService:
    """A service whose program is a shell script, in a launchd."""

    def __init__(self, system: Launchd, home: Path, script: str, pause: float = 0.02) -> None:
        self.launchd = system
        self.manager = Service(home, system.run, lambda _: time.sleep(pause))
        program = home / "program"
        program.write_text(f"#!/bin/sh\ncd '{home}'\n{script}\n")
        self._up = home / "up"
        program.chmod(0o755)
        self.port = free_port()
        command = ServiceCommand(program, [], "127.0.0.1", self.port, 0.0)
        self.manager.path.parent.mkdir(parents=True)
        self.manager.path.write_bytes(self.manager.render(command)[self.manager.path])

    def wait_for(self, state: ServicePhase) -> None:
        deadline = time.monotonic() + 20
        while (found := self.manager.state()).state != state:
            assert time.monotonic() < deadline, found
            time.sleep(LOOK_SECONDS)

    def wait_until_up(self) -> None:
        """Wait until the program handles SIGTERM."""
        deadline = time.monotonic() + 20
        while not self._up.exists():
            assert time.monotonic() < deadline
            time.sleep(LOOK_SECONDS)

    def targets(self, verb: str) -> list[str]:
        return [words[1] for words in self.launchd.commands if words[0] == verb]


@contextmanager
def installed_service(
    home: Path, script: str = WAITS, **options: bool | float
) -> Iterator[InstalledService]:
    with tempfile.TemporaryDirectory() as folder, launchd(Path(folder), {}, **options) as system:
        yield InstalledService(system, home, script)


@pytest.mark.parametrize(("has_screen", "target"), [(True, GUI), (False, USER)])
def test_launchd_service_loads_in_available_domain(has_screen: bool, target: str, tmp_path: Path):
    with installed_service(tmp_path, has_screen=has_screen) as service:
        service.manager.load(is_moved=True)
        service.wait_until_up()
        assert service.manager.is_listening()
        first = service.launchd.pid()
        service.manager.restart()
        service.wait_for("running")
        assert service.launchd.pid() != first
        assert service.targets("bootstrap") == [target.rpartition("/")[0]]
        service.manager.stop()
        assert service.targets("bootout") == [target]
        assert not service.manager.is_listening()


def test_launchd_service_is_found_in_user_domain_after_login(tmp_path: Path):
    with installed_service(tmp_path, has_screen=False) as service:
        service.manager.load(is_moved=True)
        service.wait_for("running")
        service.launchd.domains.add(GUI.rpartition("/")[0])
        assert service.manager.is_running()
        service.manager.stop()
        assert not service.manager.is_running()
        assert service.targets("bootout") == [USER]


def test_launchd_load_enables_disabled_service(tmp_path: Path):
    """A user can disable it among the login items; an installation enables it again."""
    with installed_service(tmp_path) as service:
        service.launchd.disabled.add(GUI)
        service.manager.load(is_moved=True)
        service.wait_for("running")


def test_launchd_load_fails_at_once_without_domain(tmp_path: Path):
    with installed_service(tmp_path) as service:
        service.launchd.domains.clear()
        with pytest.raises(CommandFailed, match="125: Domain does not support"):
            service.manager.load(is_moved=True)
        assert len(service.targets("bootstrap")) == 1


def test_throttled_launchd_start_is_waited_for(tmp_path: Path):
    """Between two starts, launchd lets ten seconds pass: `spawn scheduled`."""
    with installed_service(tmp_path, throttle=300.0) as service:
        service.manager.load(is_moved=True)
        service.wait_until_up()
        service.manager.restart()
        assert service.manager.state().state == "starting"
        with pytest.raises(CommandFailed, match="no answer within"):
            wait_for_answer(service.manager, settings(service.port, 0.1), print)


def test_throttled_launchd_start_is_given_up_after_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(status, "_GRACE_SECONDS", 0.5)
    with installed_service(tmp_path, throttle=300.0) as service:
        service.manager.load(is_moved=True)
        service.wait_until_up()
        service.manager.restart()
        with pytest.raises(CommandFailed, match="the service is not running"):
            wait_for_answer(service.manager, settings(service.port, 60.0), print)


@pytest.mark.parametrize(
    ("script", "exit_text"), [("exit 1", "1 (it crashed)"), ("kill -9 $$", "9")]
)
def test_crashed_launchd_service_is_not_waited_for(script: str, exit_text: str, tmp_path: Path):
    with installed_service(tmp_path, script, throttle=300.0) as service:
        service.manager.load(is_moved=True)
        service.wait_for("restarting")
        assert exit_text in str(service.manager.state().last_exit)
        with pytest.raises(CommandFailed, match="the service is not running: it ended with"):
            wait_for_answer(service.manager, settings(service.port, 60.0), print)


def test_launchd_service_raises_open_file_limit(tmp_path: Path):
    with installed_service(tmp_path, f"sleep 0.2; ulimit -Sn > files; {WAITS}") as service:
        service.manager.load(is_moved=True)
        service.wait_for("running")
        path, deadline = tmp_path / "files", time.monotonic() + 10
        while not (path.exists() and path.read_text()):
            assert time.monotonic() < deadline
            time.sleep(LOOK_SECONDS)
        assert int(path.read_text()) > SOFT_FILES


def settings(port: int, seconds: float) -> Settings:
    return Settings(server=Server(port=port), engine=EngineSettings(start_timeout_seconds=seconds))
