"""Sockets that are passed to another process over a Unix socket. The receiver acknowledges each.

Until then the sender keeps its own descriptor: macOS takes a socket to which only messages refer
for garbage (`unp_gc` in XNU), and the receiver reads an end of file.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterator

ACKNOWLEDGEMENT = b"\0"
"""The first byte that the receiver sends over the socket that it got."""
_HELD_BYTES = 256 << 10


def socket_pair(held_bytes: int) -> tuple[socket.socket, socket.socket]:
    """Two ends with buffers of `held_bytes` each, as far as the system allows.

    macOS's default is 8 KiB, less than a mask of a large vocabulary.
    """
    pair = socket.socketpair()
    for end in pair:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, option, held_bytes)
    return pair


class PassedSocket:
    """A pair of sockets: `connection` stays here, the other end is passed once."""

    def __init__(self) -> None:
        self.connection, self._passed = socket_pair(_HELD_BYTES)
        self._channel: socket.socket | None = None
        """The channel that it was sent over, until the receiver acknowledges it."""

    def send(self, channel: socket.socket, message: bytes) -> None:
        """Pass the other end with `message` over `channel`. Raises OSError: it is closed then."""
        try:
            socket.send_fds(channel, [message], [self._passed.fileno()])
        except OSError:
            self._passed.close()
            raise
        self._channel = channel

    def wait(self, events: int, seconds: float) -> bool:
        """Whether `connection` may be ready for `events` within this time.

        Also true if the receiving process ends before it took the other end.
        """
        poll = select.poll()
        poll.register(self.connection, events)
        if self._channel is not None:
            try:
                poll.register(self._channel, select.POLLIN)  # it says nothing: this is its end
            except ValueError:  # closed here
                self.acknowledge()
        ready = poll.poll(1000 * seconds)
        if any(descriptor != self.connection.fileno() for descriptor, _ in ready):
            self.acknowledge()
        return bool(ready)

    def acknowledge(self) -> None:
        """Close our copy of the passed end: it was received, or never will be."""
        self._channel = None
        self._passed.close()

    def close(self) -> None:
        self.acknowledge()
        self.connection.close()


def receive(channel: socket.socket, size: int) -> Iterator[tuple[bytes, socket.socket]]:
    """Messages of `size` bytes, each with the socket that came with it, until `channel` ends."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, size, 1)
        if not message:
            return
        for descriptor in descriptors:
            with socket.socket(fileno=descriptor) as connection:
                with contextlib.suppress(OSError):  # the sender is gone
                    connection.sendall(ACKNOWLEDGEMENT)
                yield message, connection
