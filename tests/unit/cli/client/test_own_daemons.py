"""Commands find the user's daemons that answer, and only those that stay."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.daemons import SCRIPTED, free_port
from tests.support.daemons import running_daemon as scripted
from tests.unit.api.conftest import listening
from tests.unit.api.scripted_engine import ScriptedEngine
from vlm_server.cli import exit_codes
from vlm_server.cli.client import own_daemons
from vlm_server.cli.client.daemon import (
    Daemon,
    find,
    find_and_say,
    is_daemon,
    running_daemon,
    url_of,
)
from vlm_server.cli.doctor import situation
from vlm_server.cli.doctor.daemon import client as doctor_client
from vlm_server.cli.doctor.daemon import look_at_daemon
from vlm_server.cli.doctor.self_test import ask_running
from vlm_server.cli.main import build_parser, main
from vlm_server.settings import Server, Settings

NOBODY = "http://127.0.0.1:9/v1"


class Handler(BaseHTTPRequestHandler):
    answer: bytes

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def answering(answer: bytes = b'{"status": "live"}') -> Iterator[str]:
    handler = type("Answering", (Handler,), {"answer": answer})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
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
        assert own_daemons.running() == []
        assert file.exists()
    assert own_daemons.others_than(NOBODY) == []
    assert not file.exists()


def test_daemon_starts_beside_one_with_its_number_in_another_container(folder: Path) -> None:
    """Processes of two containers have the same numbers, and may share the folder."""
    file = folder / str(os.getpid())
    with file.open("w") as other:
        other.write(NOBODY)
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        with own_daemons.listed("http://127.0.0.1:8/v1"):
            assert file.read_text() == NOBODY
        assert file.read_text() == NOBODY
    with own_daemons.listed("http://127.0.0.1:8/v1"):
        assert file.read_text() == "http://127.0.0.1:8/v1"
    assert not file.exists()


def test_command_sends_nothing_to_address_of_dead_daemon(
    folder: Path, configured: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even if another process of this user has its number."""
    with answering() as url:
        for pid in (dead_pid(), str(os.getpid())):
            (folder / pid).write_text(url)
        assert find(Server(port=configured)) == [url_of("127.0.0.1", configured)]
        assert main(["ps"]) == 1
        assert f"but one does at {url} (--url)" in capsys.readouterr().err


def test_foreign_program_at_configured_address_hides_no_daemon(folder: Path) -> None:
    with answering(b"<html>") as foreign, answering() as url, own_daemons.listed(url):
        assert find(Server(port=urlsplit(foreign).port or 0)) == [url]
        assert find(Server(port=0)) == [url]


async def test_daemon_that_refuses_name_of_host_is_there() -> None:
    settings = Settings(server=Server(allowed_hosts=("vlm.example.org",)))
    async with listening(ScriptedEngine(), settings) as port:
        with Daemon(url_of("127.0.0.1", port)) as daemon:
            assert await asyncio.to_thread(daemon.is_there)


def test_doctor_sends_settings_to_their_own_address_alone() -> None:
    server = Server(port=8123, api_keys=("a-long-enough-key",), allowed_hosts=("a.test",))
    with doctor_client(server, url_of("127.0.0.1", 8123)) as http:
        assert http.headers["host"] == "a.test"
        assert http.headers["authorization"] == "Bearer a-long-enough-key"
    with doctor_client(server, url_of("127.0.0.1", 8124)) as http:
        assert not {"host", "authorization"} & set(http.headers)


async def test_doctor_knows_no_key_of_daemon_at_other_address(configured: int) -> None:
    settings = Settings(server=Server(api_keys=("a-long-enough-key",)))
    async with listening(ScriptedEngine(), settings) as port:
        with own_daemons.listed(url_of("127.0.0.1", port)):
            arguments = build_parser(["doctor"]).parse_args(["doctor"])
            found = await asyncio.to_thread(ask_running, situation.examine(arguments))
    assert (found.level, found.text) == ("warning", "not done: the daemon needs an API key")


@pytest.mark.parametrize("answer", [b"<html>", b"{}", b'["live"]'])
def test_file_of_killed_daemon_goes_if_other_program_answers(folder: Path, answer: bytes) -> None:
    file = folder / dead_pid()
    with answering(answer) as url:
        file.write_text(url)
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
    with scripted(folder.parents[1], program=SCRIPTED):
        assert any(folder.iterdir())
    with running_daemon([], stop_seconds=20):
        assert not any(folder.iterdir())


@pytest.fixture
def configured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The port in the settings file, at which nobody listens."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder.parents[1]))
    port = free_port()
    (folder.parent / "config.toml").write_text(f"server.port = {port}\n")
    return port


def doctor_on_daemon(*words: str) -> str:
    """The doctor's text; the whole command would turn this process's logging off."""
    arguments = build_parser(["doctor"]).parse_args(["doctor", *words])
    return look_at_daemon(situation.examine(arguments))[-1].text


def test_every_command_finds_daemon_of_user(
    folder: Path, configured: int, capsys: pytest.CaptureFixture[str]
) -> None:
    nobody = url_of("127.0.0.1", configured)
    commands = ("ps", "models list", "top --once", "connect codex --print", "ask Who?")
    with scripted(folder.parents[1], program=SCRIPTED) as daemon:
        url = f"{daemon.url}/v1"
        for command in (*commands, "bench --scenarios repeat --rounds 1"):
            assert main(command.split()) == 0
            told = capsys.readouterr()
            assert f"No daemon answers at {nobody}: taking yours at {url}.\n" in told.err
            assert told.out
        for port in (daemon.port, 0):
            assert main(["ps", "--set", f"server.port={port}"]) == 0
            assert capsys.readouterr().err == ""
        assert f"(yours at {url}; none answers at {nobody})" in doctor_on_daemon()
        given = doctor_on_daemon("--set", f"server.port={configured}")
        assert given == "none runs with these settings"


def test_single_daemon_is_taken_silently_beside_default_address(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if is_daemon(url_of(Server().host, Server().port)):
        pytest.skip("a daemon listens on the default port")
    file = folder / str(os.getpid())
    with answering() as url, file.open("w") as held:
        file.write_text(url)
        fcntl.flock(held, fcntl.LOCK_EX)
        assert find_and_say(Server()) == url
        assert capsys.readouterr().err == ""


def test_newest_of_several_daemons_is_taken(
    folder: Path, configured: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.ExitStack() as stack, answering() as newer, answering() as older:
        for age, (pid, url) in enumerate({os.getpid(): newer, os.getppid(): older}.items()):
            (folder / str(pid)).write_text(url)
            os.utime(folder / str(pid), (1000 - age, 1000 - age))
            fcntl.flock(stack.enter_context((folder / str(pid)).open()), fcntl.LOCK_EX)
        assert main(["ps"]) == 1, "it tells no status"
    assert f"taking yours at {newer}, the newest; --url names others: {older}." in (
        capsys.readouterr().err
    )


def test_ask_takes_any_daemon_that_serves_its_model(
    folder: Path, configured: int, capsys: pytest.CaptureFixture[str]
) -> None:
    state = folder.parents[1]
    other = ("--set", "model.name=other")
    with (
        scripted(state, *other, program=SCRIPTED) as older,
        scripted(state, program=SCRIPTED) as newer,
    ):
        for model, daemon in (("other", older), ("demo", newer)):
            assert main(["ask", "--model", model, "Who?"]) == 0
            told = capsys.readouterr()
            taken = f"Taking your daemon at {daemon.url}/v1, which serves this model.\n"
            assert told.err.startswith(taken)
            assert told.out
        assert main(["ask", "--model", "otter", "Who?"]) == exit_codes.WRONG_SETTINGS
    assert configured


def test_every_command_says_alike_that_nobody_answers(
    configured: int, capsys: pytest.CaptureFixture[str]
) -> None:
    nobody = f"no daemon answers at {url_of('127.0.0.1', configured)}; 'vlm-server serve' starts"
    for command in ("ps", "top", "connect codex", "bench --scenarios repeat"):
        assert main(command.split()) == 1
        assert nobody in capsys.readouterr().err
