"""What a client is sent and has not read, in bytes and seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from vlm_server.api.http.connection.deadline import Deadline
from vlm_server.settings import Limits

_READ_BYTES = 64 * 1024
"""What a client must read within `limits.unread_timeout_seconds`, if so much waits for it."""


class Outgoing:
    """Writes without waiting. Calls `on_stall` with the reason if the client reads too little."""

    def __init__(
        self, transport: asyncio.Transport, limits: Limits, on_stall: Callable[[str], None]
    ) -> None:
        self._transport = transport
        self._limits = limits
        self._on_stall = on_stall
        self._deadline = Deadline(asyncio.get_running_loop(), self._on_deadline)
        self._written_bytes = 0
        self._mark = 0
        """What the client had been delivered when the deadline was set."""

    def write(self, data: bytes) -> None:
        """Send `data`, however much that is; too much must not be unread by then."""
        if self._transport.get_write_buffer_size() > self._limits.max_unread_bytes:
            self._on_stall("left too much unread")
            return
        self._written_bytes += len(data)
        self._transport.write(data)

    def paused(self) -> None:
        """The transport has more than it sends at once."""
        self._mark = self._delivered_bytes()
        self._deadline.set(self._limits.unread_timeout_seconds)

    def resumed(self) -> None:
        """The transport has sent nearly all."""
        self._deadline.clear()

    def close(self) -> None:
        """Nothing is sent any more."""
        self._deadline.cancel()

    def _on_deadline(self) -> None:
        delivered = self._delivered_bytes()
        if delivered - self._mark < _READ_BYTES:
            self._on_stall("does not read its answer")
        else:
            self._mark = delivered
            self._deadline.set(self._limits.unread_timeout_seconds)

    def _delivered_bytes(self) -> int:
        return self._written_bytes - self._transport.get_write_buffer_size()
