"""Rank 0 and its followers find each other; a connection without the secret is rejected."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from queue import SimpleQueue
from typing import TypeVar

import pytest

from tests.support.ports import free_ports
from vlm_server import settings
from vlm_server.errors import EngineBroken, ModelLoadError
from vlm_server.protocol.commands import Rank
from vlm_server.runner.distributed import connection
from vlm_server.runner.distributed.connection import Followers, RankZeroConnection
from vlm_server.runner.distributed.messages import Clear, Hello, Loaded, SetLimit

SECONDS = 10.0
T = TypeVar("T")


class Meeting:
    """Rank 0 and its followers in one process; `ends` holds the followers' exit statuses."""

    def __init__(self, size: int) -> None:
        self.rank = Rank(
            0, size, "ring", {}, {}, "127.0.0.1", free_ports(1), "secret", settings.Log()
        )
        self.connections: dict[int, RankZeroConnection] = {}
        self.ends = SimpleQueue[int]()
        self._accepted = SimpleQueue[Followers]()
        waiting = lambda: self._accepted.put(Followers.accept(self.rank))  # noqa: E731
        threading.Thread(target=waiting, daemon=True).start()

    def come(self, number: int) -> None:
        rank_zero = self.connections[number] = RankZeroConnection.find(self.rank, self.ends.put)
        rank_zero.send(Hello(number, 1000 * number, "cpu", "one"))

    def followers(self) -> Followers:
        return self._accepted.get(timeout=SECONDS)


@pytest.fixture
def meeting() -> Meeting:
    made = Meeting(3)
    made.come(2)
    made.come(1)
    return made


def test_followers_are_ordered_by_rank(meeting: Meeting):
    followers = meeting.followers()
    assert [hello.rank for hello in followers.hellos] == [1, 2]
    meeting.connections[1].send(Loaded("a"))
    meeting.connections[2].send(Loaded("b"))
    assert followers.answers() == [Loaded("a"), Loaded("b")]


def test_messages_reach_all_followers_in_order(meeting: Meeting):
    followers = meeting.followers()
    followers.send(SetLimit(5))
    followers.send(Clear(()))
    for rank_zero in meeting.connections.values():
        assert rank_zero.expect(SetLimit) == SetLimit(5)
        with pytest.raises(EngineBroken, match="Clear instead of SetLimit"):
            rank_zero.expect(SetLimit)


def test_connection_without_secret_is_rejected():
    meeting = Meeting(2)
    address = (meeting.rank.host, meeting.rank.port)
    with pytest.raises((AuthenticationError, EOFError, ConnectionResetError)):
        connected(address, b"guessed")
    meeting.come(1)
    assert [hello.rank for hello in meeting.followers().hellos] == [1]


def test_silent_stranger_only_delays_followers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "_HELLO_SECONDS", 0.3)
    meeting = Meeting(2)
    stranger = until_listening(
        lambda: socket.create_connection((meeting.rank.host, meeting.rank.port))
    )
    threading.Thread(target=meeting.come, args=(1,), daemon=True).start()
    assert [hello.rank for hello in meeting.followers().hellos] == [1]
    stranger.close()


def test_port_in_use_is_named_in_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        rank = Rank(0, 2, "ring", {}, {}, "127.0.0.1", port, "secret", settings.Log())
        with pytest.raises(ModelLoadError, match=rf"127.0.0.1:{port} \(distributed.port\)"):
            Followers.accept(rank)


def connected(address: tuple[str, int], secret: bytes) -> object:
    return until_listening(lambda: Client(address, authkey=secret))


def until_listening(connect: Callable[[], T]) -> T:
    """Retry until the port is listening."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            return connect()
        except ConnectionRefusedError:
            assert time.monotonic() < deadline


def test_followers_end_with_rank_0(meeting: Meeting):
    meeting.followers()  # which nobody keeps
    assert [meeting.ends.get(timeout=SECONDS) for _ in range(2)] == [0, 0]
