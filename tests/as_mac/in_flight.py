"""Sockets that are closed while a message carries them, as macOS treats them.

XNU takes a socket to which only messages refer for garbage, and empties it: the process that
receives it reads an end (`unp_gc` in bsd/kern/uipc_usrreq.c). It looks when a Unix socket is
closed, so that this is a matter of luck there; here it always happens.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
from typing import Any

_real_send = socket.send_fds
_real_close = socket.socket._real_close  # type: ignore[attr-defined]
_carriers: dict[int, socket.socket] = {}
"""The socket over which each of these descriptors was sent last."""


def install() -> None:
    """Treat this process's sockets so. Linux alone tells whether a message was received."""
    socket.send_fds = _send_fds
    socket.socket._real_close = _close  # type: ignore[attr-defined]


def remove() -> None:
    socket.send_fds = _real_send
    socket.socket._real_close = _real_close  # type: ignore[attr-defined]
    _carriers.clear()


def _send_fds(channel: socket.socket, buffers: Any, fds: Any, *rest: Any) -> int:
    _carriers.update(dict.fromkeys(fds, channel))
    return _real_send(channel, buffers, fds, *rest)


def _close(self: socket.socket, *arguments: Any) -> None:
    channel = _carriers.pop(self.fileno(), None)
    if channel is not None and _has_unread(channel):
        self.shutdown(socket.SHUT_RDWR)
    _real_close(self, *arguments)


def _has_unread(channel: socket.socket) -> bool:
    """Whether the other end has not received all that was sent."""
    if channel.fileno() < 0:
        return False
    (unread,) = struct.unpack("i", fcntl.ioctl(channel, termios.TIOCOUTQ, bytes(4)))
    return bool(unread)
