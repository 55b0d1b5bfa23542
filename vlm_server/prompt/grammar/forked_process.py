"""The engine's end of a socket to a process forked by `grammar_process`, and its messages."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import time
import weakref
from collections.abc import Sequence

import msgspec

from vlm_server.platform.child import messages
from vlm_server.platform.child.passing import ACKNOWLEDGEMENT, PassedSocket
from vlm_server.platform.footprint import POLL_SECONDS, MemoryBound

COUNT = struct.Struct("<I")
"""The message with a socket: the number of the request's answers."""
PID = struct.Struct("<I")


class Compiled(msgspec.Struct, frozen=True, array_like=True):
    """A compiled grammar: its memory in bytes, and the mask of an answer's first token, as bits."""

    size_bytes: int
    mask: bytes


class Follow(msgspec.Struct, frozen=True, array_like=True):
    """Sampled tokens to append to the answer `choice`, or drafts to try on it."""

    choice: int
    token_ids: Sequence[int]
    are_drafts: bool


class Masks(msgspec.Struct, frozen=True, array_like=True):
    """The reply to `Follow`: a mask after all sampled tokens, or after each draft token."""

    masks: list[bytes]
    """Bits of the allowed tokens; empty if the answer can't go on."""
    forced: tuple[int, ...]
    """Tokens that the grammar forces next, if known."""
    cpu_seconds: float


class SchemaError(Exception):
    """A schema that can't be obeyed; the message says why, in one line."""


_GREETING_BYTES = len(ACKNOWLEDGEMENT) + PID.size
_HUNG_UP = select.POLLHUP | select.POLLERR | select.POLLNVAL
_START_SECONDS = 60.0
_GRACE_SECONDS = 2.0
"""Time after its own deadline, at which a process ends itself, until it counts as dead."""
_PROMPT_SECONDS = 0.05
_LONG_NICENESS = 5
"""The niceness of work that takes longer than `_PROMPT_SECONDS`: running answers come first."""


class ForkedProcess:
    """A forked process at the other end of a socket; it sends its process id first."""

    def __init__(self, passed_socket: PassedSocket, memory_bytes: int) -> None:
        """memory_bytes: bound on the memory that the process may add."""
        self._passed = passed_socket
        self._memory_bytes = memory_bytes
        self._bound: MemoryBound | None = None
        self._socket = passed_socket.connection
        self._socket.setblocking(False)
        weakref.finalize(self, passed_socket.close)
        self._received = bytearray()
        self._pid = 0
        self._niceness = 0

    @property
    def has_hung_up(self) -> bool:
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)  # macOS reports no hang-up without an event
        except ValueError:  # closed
            return True
        return any(event & _HUNG_UP for _, event in poll.poll(0))

    def greet(self) -> None:
        """Receive the process id. Raises TimeoutError, OSError or EOFError."""
        deadline = time.monotonic() + _START_SECONDS
        while not self._pid:
            if not self._read(deadline - time.monotonic()):
                raise TimeoutError

    def send(self, message: bytes) -> None:
        """Send `message`. Raises OSError, also if the process does not read it in time."""
        remaining = memoryview(message)
        while remaining:
            try:
                remaining = remaining[self._socket.send(remaining) :]
            except BlockingIOError:
                if not self._passed.wait(select.POLLOUT, _GRACE_SECONDS):
                    raise TimeoutError from None

    def begin(self, count: int, passed_socket: PassedSocket) -> None:
        """Fork a process that follows `count` answers over `passed_socket`. Raises OSError."""
        passed_socket.send(self._socket, COUNT.pack(count))

    def receive(self, seconds: float) -> tuple[bytes, bool] | None:
        """The next message and its flag, if it comes in time. Raises OSError or EOFError."""
        deadline = time.monotonic() + seconds
        while (message := messages.parse(self._received)) is None:
            seconds_left = max(deadline - time.monotonic(), 0.0)
            if not self._read(min(seconds_left, POLL_SECONDS)) and seconds_left == 0:
                return None
        body, flag, size = message
        del self._received[:size]
        return body, flag

    def receive_late(self, seconds: float) -> tuple[bytes, bool]:
        """`receive` a reply that may take `seconds`; longer work gets a lower priority.

        Raises TimeoutError, OSError or EOFError.
        """
        if received := self.receive(_PROMPT_SECONDS):
            return received
        self.be_nice(_LONG_NICENESS)
        if received := self.receive(seconds + _GRACE_SECONDS):
            return received
        raise TimeoutError

    def be_nice(self, niceness: int) -> None:
        """Lower the process's priority, which can't be raised again."""
        if niceness > self._niceness and self._pid and not self.has_hung_up:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._pid, niceness)
                self._niceness = niceness

    def kill(self) -> None:
        """Kill the process. Its id is not reused while its end of the socket is open."""
        if self._pid and not self.has_hung_up:
            with contextlib.suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        self._passed.close()

    def _read(self, seconds: float) -> bool:
        """Receive for up to `seconds`; returns whether anything may have arrived.

        Also kills a process that exceeds its memory bound. Raises OSError or EOFError.
        """
        if self._bound is not None and self._bound.is_exceeded():
            self.kill()
        if not self._passed.wait(select.POLLIN, seconds):
            return False
        size = len(self._received)
        with contextlib.suppress(BlockingIOError):
            while chunk := self._socket.recv(1 << 18):
                self._received += chunk
            if len(self._received) == size:  # otherwise the next call raises it
                raise EOFError
        if self._received and not self._pid:
            self._passed.acknowledge()
        if not self._pid and len(self._received) >= _GREETING_BYTES:
            (self._pid,) = PID.unpack_from(self._received, len(ACKNOWLEDGEMENT))
            del self._received[:_GREETING_BYTES]
            self._bound = MemoryBound(self._pid, self._memory_bytes, beyond_now=True)
        return True
