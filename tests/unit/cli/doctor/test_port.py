"""The doctor tells free, taken, silent and unavailable ports apart, with real sockets."""

from __future__ import annotations

import http.server
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vlm_server.cli import port_owner
from vlm_server.cli.doctor import daemon
from vlm_server.settings import Server


@contextmanager
def listening() -> Iterator[tuple[socket.socket, Server]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener, Server(port=listener.getsockname()[1])


@contextmanager
def serving(status: int, body: bytes) -> Iterator[Server]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Server(port=server.server_address[1])
        server.shutdown()


def test_doctor_accepts_free_port() -> None:
    with listening() as (_, server):
        pass
    assert daemon.port(server).level == "ok"
    assert daemon.port(Server(port=0)).level == "ok"


def test_doctor_names_process_that_holds_port() -> None:
    with serving(404, b"hello") as server:
        found = daemon.port(server)
    assert found.level == "problem"
    assert f"process {os.getpid()}" in found.text
    assert "--port" in found.advice


@pytest.mark.parametrize("body", [b'{"status": "live"}', b'{"status":"live"}'])
def test_doctor_recognizes_own_daemon_on_port(body: bytes) -> None:
    with serving(200, body) as server:
        assert daemon.port(server).level == "ok"
    with serving(200, b'["live"]') as server:
        assert daemon.port(server).level == "problem"


def test_doctor_reports_silent_program_on_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(daemon, "_ANSWER_SECONDS", 0.5)
    with listening() as (_, server):
        found = daemon.port(server)
    assert found.level == "problem"
    assert "does not answer" in found.text


def test_doctor_sends_allowed_host_header() -> None:
    names = Server(port=1, allowed_hosts=("vlm.example.org", "other.example.org"))
    assert daemon.host_header(names) == {"Host": "vlm.example.org"}
    assert daemon.host_header(Server(port=1, allowed_hosts=("a.test", "127.0.0.1"))) == {}
    assert daemon.host_header(Server(port=1)) == {}


def test_doctor_reports_address_of_another_machine() -> None:
    found = daemon.port(Server(host="192.0.2.1", port=0 + 8000, api_keys=("a-long-enough-key",)))
    assert found.level == "problem"
    assert "192.0.2.1" in found.text


def test_listening_sockets_are_read_from_proc(tmp_path: Path) -> None:
    net = tmp_path / "proc/net"
    net.mkdir(parents=True)
    (net / "tcp").write_text(
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  t ino\n"
        "   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000 0 777\n"
        "   1: 0100007F:1F40 0100007F:C000 01 00000000:00000000 00:00000000 00000000  1000 0 778\n"
    )
    assert list(port_owner.listening(8000, tmp_path)) == [("777", 1000)]
    assert list(port_owner.listening(8001, tmp_path)) == []


def test_socket_owner_is_read_from_lsof() -> None:
    assert port_owner.owner_in_lsof("p4711\ncollama\n") == "ollama (process 4711)"
    assert port_owner.owner_in_lsof("") == "a program of another user"
