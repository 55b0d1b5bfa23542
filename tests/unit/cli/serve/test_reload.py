"""The daemon restarts when valid new settings appear, and at no other time."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vlm_server import settings
from vlm_server.cli.serve.reload import Reloader, Shutdown

pytestmark = pytest.mark.unit


class WatchedSettings:
    """A settings file with its reloader, and the number of restarts that this requested."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.restarts = 0
        self.write("[server]\nport = 9000\n")
        self.reloader = Reloader(path)
        self.reloader.check_with(settings.load(path), lambda: settings.load(path))
        self.reloader.listen(self._restart)

    def write(self, text: str, seconds_ago: float = 60.0) -> None:
        self.path.write_text(text)
        then = time.time() - seconds_ago
        os.utime(self.path, (then, then))

    def _restart(self) -> None:
        self.restarts += 1


@pytest.fixture
async def watched(tmp_path: Path) -> WatchedSettings:
    return WatchedSettings(tmp_path / "my.toml")


@pytest.fixture(autouse=True)
def _hang_up_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


async def test_unchanged_settings_file_is_not_read(watched: WatchedSettings) -> None:
    watched.reloader.check_with(settings.Settings(), lambda: pytest.fail("read"))
    await watched.reloader.check_file()


async def test_changed_settings_restart_daemon(watched: WatchedSettings) -> None:
    watched.write("[server]\nport = 9001\n", seconds_ago=30)
    await watched.reloader.check_file()
    assert watched.restarts == 1


async def test_changed_comment_does_not_restart_daemon(watched: WatchedSettings) -> None:
    watched.write("# my own\n[server]\nport = 9000\n", seconds_ago=30)
    await watched.reloader.check_file()
    assert watched.restarts == 0


async def test_freshly_written_settings_are_read_later(watched: WatchedSettings) -> None:
    watched.write("[server]\nport = 9001\n", seconds_ago=0)
    await watched.reloader.check_file()
    assert watched.restarts == 0
    watched.write("[server]\nport = 9001\n", seconds_ago=3)
    await watched.reloader.check_file()
    assert watched.restarts == 1


async def test_briefly_missing_settings_file_does_not_restart(watched: WatchedSettings) -> None:
    watched.path.unlink()
    await watched.reloader.check_file()
    watched.write("[server]\nport = 9001\n", seconds_ago=30)
    await watched.reloader.check_file()
    assert watched.restarts == 1


async def test_invalid_new_settings_are_logged_once(
    watched: WatchedSettings, caplog: pytest.LogCaptureFixture
) -> None:
    watched.write("[server]\nport = 'none'\n", seconds_ago=30)
    for _ in range(3):
        await watched.reloader.check_file()
    assert watched.restarts == 0
    assert caplog.text.count("the new settings are refused") == 1


async def test_unreadable_new_settings_do_not_restart(
    watched: WatchedSettings, caplog: pytest.LogCaptureFixture
) -> None:
    def unreadable() -> settings.Settings:
        raise PermissionError(13, "Permission denied", "/models/mine")

    watched.reloader.check_with(settings.Settings(), unreadable)
    watched.write("[server]\nport = 9001\n", seconds_ago=30)
    await watched.reloader.check_file()
    assert watched.restarts == 0
    assert "/models/mine" in caplog.text
    watched.reloader.check_with(settings.Settings(), lambda: settings.load(watched.path))
    watched.write("[server]\nport = 9002\n", seconds_ago=30)
    await watched.reloader.check_file()
    assert watched.restarts == 1


async def test_sighup_during_settings_check_restarts_daemon(watched: WatchedSettings) -> None:
    began, may_end = threading.Event(), threading.Event()
    reads: list[settings.Settings] = []

    def slowly() -> settings.Settings:
        reads.append(settings.load(watched.path))
        began.set()
        assert may_end.wait(10)
        return reads[-1]

    watched.reloader.check_with(settings.load(watched.path), slowly)
    watched.write("# a comment\n[server]\nport = 9000\n", seconds_ago=30)
    looking = asyncio.create_task(watched.reloader.check_file())
    await asyncio.to_thread(began.wait, 10)
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.sleep(0.05)
    may_end.set()
    await looking
    assert (len(reads), watched.restarts) == (2, 1)


def test_shutdown_stop_overrides_restart() -> None:
    for order in (("stop", "start_again"), ("start_again", "stop")):
        calls: list[int] = []
        ending = Shutdown(lambda calls=calls: calls.append(1))  # type: ignore[misc]
        for call in order:
            getattr(ending, call)()
        assert not ending.is_restart
        assert len(calls) == 2
