"""Bounds on unread responses, in bytes and seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from vlm_server.settings import Limits

_READ_BYTES = 64 * 1024
"""The least that a client must read within `limits.unread_timeout_seconds`."""


class Deadline:
    """A timer that is often moved and rarely due; moving it later keeps the loop's timer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_due: Callable[[], None]) -> None:
        self._loop = loop
        self._on_due = on_due
        self._due: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> None:
        """Set the timer to `seconds` from now."""
        self.set_at(self._loop.time() + seconds)

    def set_at(self, due_at: float) -> None:
        """Set the timer to this time of the event loop's clock."""
        self._due = due_at
        if self._timer is not None and self._timer.when() > due_at:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_at(due_at, self._fire)

    def clear(self) -> None:
        """Stop the timer until it is set again."""
        self._due = None

    def cancel(self) -> None:
        """Stop the timer for good, and drop `on_due`."""
        self.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        if self._due is None:
            return
        if self._due > self._loop.time():
            self._timer = self._loop.call_at(self._due, self._fire)
            return
        self._due = None
        self._on_due()


class Outgoing:
    """The sending side of a connection, which never waits; `on_stall` is called with a reason."""

    def __init__(
        self, transport: asyncio.Transport, limits: Limits, on_stall: Callable[[str], None]
    ) -> None:
        self._transport = transport
        self._limits = limits
        self._on_stall = on_stall
        self._deadline = Deadline(asyncio.get_running_loop(), self._on_deadline)
        self._is_low = asyncio.Event()
        self._is_low.set()
        self._written_bytes = 0
        self._mark = 0
        """Bytes delivered when the deadline was set."""

    def write(self, data: bytes) -> None:
        """Send `data`, of any size, unless the client is gone or left too many bytes unread.

        After a failed write the transport is closing, and the connection hears of it in the next
        turn of the loop: asyncio would warn of each further write until then.
        """
        if self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > self._limits.max_unread_bytes:
            self._on_stall("left too much unread")
            return
        self._written_bytes += len(data)
        self._transport.write(data)

    def paused(self) -> None:
        """The transport's buffer is full: the client must read."""
        self._is_low.clear()
        self._mark = self._delivered_bytes()
        self._deadline.set(self._limits.unread_timeout_seconds)

    def resumed(self) -> None:
        """The transport's buffer is nearly empty."""
        self._is_low.set()
        self._deadline.clear()

    def close(self) -> None:
        """Stop sending."""
        self._deadline.cancel()
        self._is_low.set()

    async def wait_until_read(self) -> None:
        """Wait until the transport's buffer is nearly empty, or closed."""
        await self._is_low.wait()

    def _on_deadline(self) -> None:
        delivered = self._delivered_bytes()
        if delivered - self._mark < _READ_BYTES:
            self._on_stall("does not read its answer")
        else:
            self._mark = delivered
            self._deadline.set(self._limits.unread_timeout_seconds)

    def _delivered_bytes(self) -> int:
        return self._written_bytes - self._transport.get_write_buffer_size()
