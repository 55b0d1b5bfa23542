"""`serve` adopts only listening sockets meant for it, and refuses addresses in use."""

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
    bound = socket.create_server((host, 0))
    return Listener((bound,), (bound.dup(),))


@pytest.mark.parametrize("pid", ["", "1", "all"])
def test_listen_ignores_systemd_sockets_of_another_pid(pid: str) -> None:
    environment = {"LISTEN_FDS": "1", "LISTEN_PID": pid, "LISTEN_FDNAMES": "x", "HOME": "/"}
    listener = listen(Server(port=0), environment, None)
    assert not listener.is_inherited
    assert environment == {"HOME": "/"}, "children find nothing of it"
    listener.sockets[0].close()


@pytest.mark.parametrize("count", ["many", "-1", "17", ""])
def test_listen_refuses_invalid_listen_fds(count: str) -> None:
    environment = {"LISTEN_FDS": count, "LISTEN_PID": str(os.getpid())}
    with pytest.raises(ConfigError, match="LISTEN_FDS"):
        listen(Server(port=0), environment, None)


class XnuSocket(socket.socket):
    """A socket as on macOS, whose kernel does not report whether it is listening."""

    def getsockopt(self, level: int, option: int, *size: int) -> Any:
        if (level, option) == (socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise OSError(errno.ENOPROTOOPT, os.strerror(errno.ENOPROTOOPT))
        return super().getsockopt(level, option, *size)


@pytest.fixture(params=[socket.socket, XnuSocket], ids=["linux", "macos"])
def adopt(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Adopt:
    """Adopts a duplicate of a socket, as if it had been passed to this process."""

    def adopted(given: socket.socket) -> socket.socket:
        monkeypatch.setattr(listener_module.socket, "socket", request.param)
        try:
            return listener_module._adopt(os.dup(given.fileno()))
        finally:
            monkeypatch.undo()

    return adopted


def test_adopted_socket_accepts_waiting_connection(adopt: Adopt) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        with socket.create_connection(listening.getsockname()) as waiting:
            accepting = adopt(listening)
            connection, address = accepting.accept()
            assert address == waiting.getsockname()
        connection.close()
        accepting.close()


def test_adopting_non_listening_socket_is_refused(adopt: Adopt) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as connected,
        socket.socket() as fresh,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
    ):
        for other in (connected, fresh, datagrams):
            with pytest.raises(ConfigError, match="no listening TCP socket"):
                adopt(other)


def test_inherited_public_socket_needs_api_key() -> None:
    listener = inherited("0.0.0.0")
    with pytest.raises(ConfigError, match="other machines"):
        check_exposure(Server(), listener)
    check_exposure(Server(api_keys=(KEY,)), listener)
    check_exposure(Server(), inherited())


def test_server_address_follows_inherited_socket() -> None:
    listener = inherited()
    port = listener.addresses[0][1]
    same = Server(host="localhost", port=port)
    assert with_inherited_address(same, listener) is same
    moved = with_inherited_address(Server(host="0.0.0.0", port=1, api_keys=(KEY,)), listener)
    assert (moved.host, moved.port) == ("127.0.0.1", port)


def test_binding_answered_address_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the kernel would allow a second listener."""

    class SocketBindingAnywhere(socket.socket):
        def bind(self, address: Any) -> None:
            pass

    with socket.create_server(("", 0)) as other:
        server = Server(host="127.0.0.1", port=other.getsockname()[1])
        monkeypatch.setattr(listener_module.socket, "socket", SocketBindingAnywhere)
        with pytest.raises(NotAvailable, match=r"127\.0\.0\.1.*in use"):
            listener_module.bind(server)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "my..host", "x" * 64])
def test_unresolvable_host_matches_no_address(host: str) -> None:
    assert not is_at(Server(host=host), [("127.0.0.1", 8000)])
