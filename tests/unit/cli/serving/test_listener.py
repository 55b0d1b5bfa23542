"""Which sockets are taken over, and from whom."""

from __future__ import annotations

import os
import socket

import pytest

from vlm_server.cli.serving.listener import (
    Listener,
    check_exposure,
    is_at,
    listen,
    where_it_listens,
)
from vlm_server.errors import ConfigError
from vlm_server.settings import Server

pytestmark = pytest.mark.unit

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
    assert where_it_listens(same, listener) is same
    moved = where_it_listens(Server(host="0.0.0.0", port=1, api_keys=(KEY,)), listener)
    assert (moved.host, moved.port) == ("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "my..host", "x" * 64])
def test_an_unknown_name_is_nowhere(host: str) -> None:
    assert not is_at(Server(host=host), [("127.0.0.1", 8000)])
