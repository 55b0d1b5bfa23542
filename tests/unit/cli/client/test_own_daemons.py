"""`ask` learns where the user's daemons answer, and only of those that stay."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.daemons import SCRIPTED
from tests.support.daemons import running_daemon as scripted
from vlm_server.cli.client import own_daemons
from vlm_server.cli.client.daemon import running_daemon

NOBODY = "http://127.0.0.1:9/v1"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def answering() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "vlm-server/daemons"
    folder.mkdir(parents=True)
    return folder


def dead_pid() -> str:
    with subprocess.Popen(["true"]) as process:
        pass
    return str(process.pid)


def test_broken_files_hide_no_daemon(folder: Path) -> None:
    (folder / str(os.getpid())).mkdir()
    (folder / ("9" * 30)).write_text(NOBODY)
    (folder / "notes").write_text(NOBODY)
    (folder / "1").write_bytes(b"\xff")
    (folder / "2").write_text(f"http://{'a' * 99}..b/v1")
    with answering() as url:
        (folder / str(os.getppid())).write_text(url)
        assert own_daemons.others_than(NOBODY) == [url]


def test_file_goes_once_neither_process_nor_address_is_there(folder: Path) -> None:
    """A daemon in another PID namespace has a number that is nobody's here."""
    file = folder / dead_pid()
    with answering() as url:
        file.write_text(url)
        assert own_daemons.others_than(NOBODY) == [url]
        assert file.exists()
    assert own_daemons.others_than(NOBODY) == []
    assert not file.exists()


def test_silent_daemons_hold_nobody_up(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, answering() as url:
        for pid in (str(os.getppid()), "1", dead_pid()):
            (folder / pid).write_text(f"http://127.0.0.1:{silent.getsockname()[1]}/v1")
        (folder / str(os.getpid())).write_text(url)
        start = time.monotonic()
        assert own_daemons.others_than(NOBODY) == [url]
        assert time.monotonic() - start < 2 * own_daemons._ANSWER_SECONDS


def test_temporary_daemon_is_not_listed(folder: Path) -> None:
    with scripted(folder.parent, program=SCRIPTED):
        assert any(folder.iterdir())
    with running_daemon([], stop_seconds=20):
        assert not any(folder.iterdir())
