"""Which sockets are taken over, and from whom."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

from vlm_server.cli.serve import listener as listener_module
from vlm_server.cli.serve.listener import (
    Listener,
    check_exposure,
    is_at,
    listen,
    with_inherited_address,
)
from vlm_server.errors import ConfigError, NotAvailable
from vlm_server.settings import Server

pytestmark = pytest.mark.unit

Adopt = Callable[[socket.socket], socket.socket]
KEY = "a-key-that-is-long-enough"


def inherited(host: str = "127.0.0.1") -> Listener:
    made = socket.create_server((host, 0))
    return Listener((made,), (made.dup(),))


@pytest.mark.parametrize("pid", ["", "1", "all"])
def test_sockets_for_another_process_are_left_alone(pid: str) -> None:
    environment = {"LISTEN_FDS": "1", "LISTEN_PID": pid, "LISTEN_FDNAMES": "x", "HOME": "/"}
    listener = listen(Server(port=0), environment, None)
    assert not listener.is_inherited
    assert environment == {"HOME": "/"}, "children find nothing of it"
    listener.sockets[0].close()


@pytest.mark.parametrize("count", ["many", "-1", "17", ""])
def test_a_number_of_sockets_that_makes_no_sense_is_refused(count: str) -> None:
    environment = {"LISTEN_FDS": count, "LISTEN_PID": str(os.getpid())}
    with pytest.raises(ConfigError, match="LISTEN_FDS"):
        listen(Server(port=0), environment, None)


class OfXnu(socket.socket):
    """A socket of macOS, whose kernel does not tell whether it listens."""

    def getsockopt(self, level: int, option: int, *size: int) -> Any:
        if (level, option) == (socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise OSError(errno.ENOPROTOOPT, os.strerror(errno.ENOPROTOOPT))
        return super().getsockopt(level, option, *size)


@pytest.fixture(params=[socket.socket, OfXnu], ids=["linux", "macos"])
def adopt(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Adopt:
    """Takes a copy of a socket over, as if it had been handed to this process."""

    def adopted(given: socket.socket) -> socket.socket:
        monkeypatch.setattr(listener_module.socket, "socket", request.param)
        try:
            return listener_module._adopt(os.dup(given.fileno()))
        finally:
            monkeypatch.undo()

    return adopted


def test_a_listening_socket_is_taken_over_with_who_waits_at_it(adopt: Adopt) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        with socket.create_connection(listening.getsockname()) as waiting:
            taken = adopt(listening)
            connection, address = taken.accept()
            assert address == waiting.getsockname()
        connection.close()
        taken.close()


def test_a_socket_that_does_not_listen_is_refused(adopt: Adopt) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as connected,
        socket.socket() as fresh,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
    ):
        for other in (connected, fresh, datagrams):
            with pytest.raises(ConfigError, match="no listening TCP socket"):
                adopt(other)


def test_what_others_can_reach_needs_a_key() -> None:
    listener = inherited("0.0.0.0")
    with pytest.raises(ConfigError, match="other machines"):
        check_exposure(Server(), listener)
    check_exposure(Server(api_keys=(KEY,)), listener)
    check_exposure(Server(), inherited())


def test_the_address_is_the_sockets() -> None:
    listener = inherited()
    port = listener.addresses[0][1]
    same = Server(host="localhost", port=port)
    assert with_inherited_address(same, listener) is same
    moved = with_inherited_address(Server(host="0.0.0.0", port=1, api_keys=(KEY,)), listener)
    assert (moved.host, moved.port) == ("127.0.0.1", port)


def test_an_address_that_somebody_answers_at_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the kernel would let us listen beside that program."""

    class Lenient(socket.socket):
        def bind(self, address: Any) -> None:
            pass

    with socket.create_server(("", 0)) as other:
        server = Server(host="127.0.0.1", port=other.getsockname()[1])
        monkeypatch.setattr(listener_module.socket, "socket", Lenient)
        with pytest.raises(NotAvailable, match=r"127\.0\.0\.1.*in use"):
            listener_module.bind(server)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "my..host", "x" * 64])
def test_an_unknown_name_is_nowhere(host: str) -> None:
    assert not is_at(Server(host=host), [("127.0.0.1", 8000)])
