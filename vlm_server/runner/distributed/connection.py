"""Connections between rank 0 and the others, authenticated by a shared secret.

Neither messages nor MLX's sums are encrypted: the network must be a trusted one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from queue import SimpleQueue
from typing import TypeVar

from vlm_server.errors import EngineBroken, ModelLoadError
from vlm_server.protocol.commands import Rank
from vlm_server.runner.distributed import messages
from vlm_server.runner.distributed.messages import Answer, Hello, Message

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)
End = Callable[[int], object]
_MAX_ANSWER_BYTES = 1 << 20
_RETRY_SECONDS = 0.05
_HELLO_SECONDS = 10.0
"""Limit for a new connection to show the secret and send its `Hello`."""
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds of silence (by Linux's and macOS's names), seconds between probes, and their number."""


class Followers:
    """Rank 0's connections to all others, by rank."""

    def __init__(self, connections: Sequence[Connection], hellos: Sequence[Hello]) -> None:
        self._connections = connections
        self.hellos = hellos

    @classmethod
    def accept(cls, rank: Rank) -> Followers:
        """Wait for all other ranks; silent connections delay that for `_HELLO_SECONDS`.

        Raises ModelLoadError if this machine can't listen.
        """
        followers, secret = dict[int, tuple[Connection, Hello]](), rank.secret.encode()
        with _listener(rank) as listener:
            while len(followers) < rank.size - 1:
                with contextlib.suppress(AuthenticationError, EOFError, OSError):
                    connection = listener.accept()
                    with _time_limit(connection):
                        deliver_challenge(connection, secret)
                        answer_challenge(connection, secret)
                        _set_up(connection)
                        hello = _answer(connection)
                    if isinstance(hello, Hello):
                        followers[hello.rank] = connection, hello
        connections, hellos = zip(*(followers[number] for number in sorted(followers)), strict=True)
        return cls(connections, hellos)

    def send(self, message: Message) -> None:
        """Send to all ranks. Raises EngineBroken if one is gone."""
        data = messages.encode(message)
        try:
            for connection in self._connections:
                connection.send_bytes(data)
        except OSError as error:
            raise EngineBroken(f"a rank of the model has left: {error}") from error

    def answers(self) -> list[Answer]:
        """The next answer of each rank. Raises EngineBroken if one is gone."""
        try:
            return [_answer(connection) for connection in self._connections]
        except (EOFError, OSError) as error:
            raise EngineBroken("a rank of the model has left while it loaded") from error

    def watch(self, end: End = os._exit) -> None:
        """End this process when a rank ends; call it after the last `answers`."""
        for number, connection in enumerate(self._connections, start=1):
            waiting = threading.Thread(
                target=_wait_for_end, args=(number, connection, end), daemon=True
            )
            waiting.start()


class RankZeroConnection:
    """A follower's connection to rank 0, whose end ends the process."""

    def __init__(self, connection: Connection, end: End) -> None:
        """`end` is called with an exit status, on another thread."""
        self._connection = connection
        self._end = end
        self._inbox: SimpleQueue[bytes] = SimpleQueue()

    @classmethod
    def find(cls, rank: Rank, end: End = os._exit) -> RankZeroConnection:
        """Connect to rank 0 as soon as it listens."""
        while True:
            try:
                connection = Client(_address(rank), authkey=rank.secret.encode())
            except ConnectionRefusedError:
                time.sleep(_RETRY_SECONDS)
                continue
            _set_up(connection)
            rank_zero = cls(connection, end)
            threading.Thread(target=rank_zero._keep_reading, daemon=True).start()
            return rank_zero

    def send(self, answer: Answer) -> None:
        self._connection.send_bytes(messages.encode(answer))

    def receive(self) -> Message:
        """Wait for the next message. Raises msgspec.MsgspecError for an invalid one.

        Decodes on the calling thread, whose stream the arrays of a message are on.
        """
        message: Message = messages.decode_message(self._inbox.get())
        return message

    def expect(self, kind: type[M]) -> M:
        """The next message. Raises EngineBroken if it is not of `kind`."""
        message = self.receive()
        if not isinstance(message, kind):
            raise EngineBroken(f"rank 0 sent {type(message).__name__} instead of {kind.__name__}")
        return message

    def _keep_reading(self) -> None:
        try:
            while True:
                self._inbox.put(self._connection.recv_bytes())
        except (EOFError, OSError):
            self._end(0)


def _address(rank: Rank) -> tuple[str, int]:
    return rank.host, rank.port


def _listener(rank: Rank) -> Listener:
    try:
        return Listener(_address(rank), backlog=rank.size)
    except OSError as error:
        raise ModelLoadError(
            f"can't listen for the other ranks at {rank.host}:{rank.port} (distributed.port): "
            f"{error.strerror}"
        ) from error


def _answer(connection: Connection) -> Answer:
    answer: Answer = messages.decode_answer(connection.recv_bytes(_MAX_ANSWER_BYTES))
    return answer


def _set_up(connection: Connection) -> None:
    """Disable Nagle's delay, and enable keepalive to notice a machine that is gone."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@contextlib.contextmanager
def _time_limit(connection: Connection) -> Iterator[None]:
    """A time limit of `_HELLO_SECONDS`, after which readers see the connection's end."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        timer = threading.Timer(_HELLO_SECONDS, _cut, (end,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _cut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended by itself
        end.shutdown(socket.SHUT_RDWR)


def _wait_for_end(number: int, connection: Connection, end: End) -> None:
    with contextlib.suppress(EOFError, OSError):
        connection.recv_bytes(_MAX_ANSWER_BYTES)
    logger.critical("rank %d of the model has left: the engine ends", number)
    end(1)
