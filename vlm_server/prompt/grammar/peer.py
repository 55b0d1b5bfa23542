"""The engine's end of a socket to a forked process (`process`), and the messages over it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import time
import weakref

from vlm_server.platform.child import messages
from vlm_server.platform.child.passing import ACKNOWLEDGEMENT, PassedSocket
from vlm_server.platform.footprint import POLL_SECONDS, MemoryBound

COMPILED = struct.Struct("<QI")
"""Memory of a grammar in bytes, and the size of its first mask, which follows."""
BEGIN = struct.Struct("<I")
"""The number of answers of a request; sent with their socket."""
PID = struct.Struct("<I")
TOKENS = struct.Struct("<IHH")
"""An answer's number, and the numbers of its sampled and of its draft tokens, whose ids follow.

The reply is a mask after the sampled tokens, if there are any, and one after each draft token.
"""
MAX_FORCED = 16
MASK = struct.Struct(f"<?fB{MAX_FORCED}i")
"""Whether the answer can go on, CPU seconds, the number of forced tokens and their ids; the mask
follows."""


class SchemaError(Exception):
    """A schema that can't be obeyed; the message says why, in one line."""


_GREETING_BYTES = len(ACKNOWLEDGEMENT) + PID.size
_HUNG_UP = select.POLLHUP | select.POLLERR | select.POLLNVAL
_START_SECONDS = 60.0
_GRACE_SECONDS = 2.0
"""After its time a process ends itself; later than this it is taken for dead."""
_PROMPT_SECONDS = 0.05
_LONG_NICENESS = 5
"""The niceness of longer work: running answers come first."""


class Peer:
    """A forked process at the other end of a socket.

    It sends its process id first, after the acknowledgement of the process that forked it.
    """

    def __init__(self, passed: PassedSocket, memory_bytes: int) -> None:
        """memory_bytes: the most that it may take beyond what it starts with."""
        self._passed = passed
        self._memory_bytes = memory_bytes
        self._bound: MemoryBound | None = None
        self._socket = passed.connection
        self._socket.setblocking(False)
        weakref.finalize(self, passed.close)
        self._received = bytearray()
        self._pid = 0
        self._niceness = 0

    @property
    def has_hung_up(self) -> bool:
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)  # macOS tells nobody who asks for nothing
        except ValueError:  # it is closed
            return True
        return any(event & _HUNG_UP for _, event in poll.poll(0))

    def greet(self) -> None:
        """Wait for its process id. Raises TimeoutError, OSError or EOFError."""
        deadline = time.monotonic() + _START_SECONDS
        while not self._pid:
            if not self._read(deadline - time.monotonic()):
                raise TimeoutError

    def send(self, message: bytes) -> None:
        """Send `message`. Raises OSError if it is not read for long."""
        rest = memoryview(message)
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                if not self._passed.wait(select.POLLOUT, _GRACE_SECONDS):
                    raise TimeoutError from None

    def begin(self, count: int, passed: PassedSocket) -> None:
        """Have it fork a process that follows `count` answers over `passed`. Raises OSError."""
        passed.send(self._socket, BEGIN.pack(count))

    def receive(self, seconds: float) -> tuple[bytes, bool]:
        """One message and its flag. Raises TimeoutError, OSError or EOFError."""
        started = time.monotonic()
        while (parsed := messages.parsed(self._received)) is None:
            elapsed = time.monotonic() - started
            is_long = elapsed >= _PROMPT_SECONDS
            if is_long:
                self.be_nice(_LONG_NICENESS)
            left = seconds + _GRACE_SECONDS - elapsed
            if left <= 0:
                raise TimeoutError
            self._read(min(left, POLL_SECONDS if is_long else _PROMPT_SECONDS))
        body, flag, size = parsed
        del self._received[:size]
        return body, flag

    def take(self, size: int, seconds: float) -> list[bytes]:
        """All whole messages of `size` bytes, waiting up to `seconds` for the first.

        Raises OSError or EOFError.
        """
        deadline = time.monotonic() + seconds
        while len(self._received) < size:
            left = deadline - time.monotonic()
            if not self._read(max(left, 0.0)) and left <= 0:
                return []
        count = len(self._received) // size
        taken = [bytes(self._received[i * size : (i + 1) * size]) for i in range(count)]
        del self._received[: count * size]
        return taken

    def be_nice(self, niceness: int) -> None:
        """Lower its priority; it can't be raised again."""
        if niceness > self._niceness and self._pid and not self.has_hung_up:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._pid, niceness)
                self._niceness = niceness

    def kill(self) -> None:
        """End it. While its end of the socket is open, its process id is still its own."""
        if self._pid and not self.has_hung_up:
            with contextlib.suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        self._passed.close()

    def _read(self, seconds: float) -> bool:
        """Receive what comes within `seconds`; returns whether anything may have come.

        Also kills a process that has outgrown its bound. Raises OSError or EOFError.
        """
        if self._bound is not None and self._bound.is_exceeded():
            self.kill()
        if not self._passed.wait(select.POLLIN, seconds):
            return False
        size = len(self._received)
        with contextlib.suppress(BlockingIOError):
            while chunk := self._socket.recv(1 << 18):
                self._received += chunk
            if len(self._received) == size:  # else the end is met by the next call
                raise EOFError
        if self._received and not self._pid:
            self._passed.acknowledge()
        if not self._pid and len(self._received) >= _GREETING_BYTES:
            (self._pid,) = PID.unpack_from(self._received, len(ACKNOWLEDGEMENT))
            del self._received[:_GREETING_BYTES]
            self._bound = MemoryBound(self._pid, self._memory_bytes, beyond_now=True)
        return True
