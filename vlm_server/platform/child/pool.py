"""A pool of processes for work on untrusted bytes: one job at a time, with a deadline.

A job may hang, crash, or take all memory: then that job fails, its process is killed, and a new
process takes the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque

from vlm_server.platform.child import launch, messages
from vlm_server.platform.child.cancellation import Cancellation, Cancelled
from vlm_server.platform.footprint import POLL_SECONDS, MemoryBound

_IDLE_SECONDS = 30.0
_PIPE_BYTES = 1 << 20
"""With less, such as Linux's 64 KiB, both ends wait for each other all the time: on a busy machine,
each time takes as long as others work."""


class ChildFailed(Exception):
    """The process died on the job."""


class ChildNotStarted(ChildFailed):
    """No process could be started for the job: the system lacks a resource."""


class ChildTimeout(Exception):
    """The job took longer than it may."""


class ChildPool:
    """At most `size` processes of `module`, started when they are needed. Thread-safe.

    `module` calls `child.serve.serve`. One idle process is kept; others end after a while.
    """

    def __init__(
        self, module: str, size: int, *arguments: str, memory_bytes: int | None = None
    ) -> None:
        """memory_bytes: the most for each process; on Linux, the process limits itself."""
        self._command = launch.command(module, *arguments)
        self._memory_bytes = memory_bytes
        self._size = size
        self._changed = threading.Condition()
        self._idle: list[tuple[float, _Child]] = []
        self._num_busy = 0
        self._waiting: deque[object] = deque()
        self._is_closed = False
        self._reaper: threading.Timer | None = None
        """Ends processes that were idle for long."""

    @property
    def num_tracked(self) -> int:
        """Jobs that run or wait."""
        with self._changed:
            return self._num_busy + len(self._waiting)

    def warm_up(self) -> None:
        """Start one process now, so that the first job need not wait for it."""
        with self._changed:
            if self._idle or self._num_busy or self._is_closed:
                return
        child = _Child(self._command, self._memory_bytes)
        with self._changed:
            if not (self._idle or self._is_closed):
                self._idle.append((time.monotonic(), child))
                return
        child.end()

    def run(self, job: messages.Body, seconds: float, cancellation: Cancellation) -> bytearray:
        """The answer to `job`. `seconds` count from when a process has it.

        Raises ChildFailed, ChildTimeout or Cancelled.
        """
        with cancellation.bounded():
            return self._run(job, seconds, cancellation)

    def close(self) -> None:
        """End the idle processes, and those that work once they have answered."""
        with self._changed:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for _, child in idle:
            child.end()

    def _run(self, job: messages.Body, seconds: float, cancellation: Cancellation) -> bytearray:
        self._wait_for_turn(cancellation)
        child: _Child | None = None
        is_retiring = True
        try:
            child = self._take()
            answer, is_retiring = child.ask(job, seconds, cancellation)
            return answer
        finally:
            if child is not None and is_retiring:
                child.end()
                child = None
            self._give_back(child)

    def _wait_for_turn(self, cancellation: Cancellation) -> None:
        """Returns when this thread may have a process. Raises Cancelled."""
        ticket = object()

        def wake() -> None:
            with self._changed:
                self._changed.notify_all()

        cancellation.on_cancel(wake)
        with self._changed:
            self._waiting.append(ticket)
            try:
                self._changed.wait_for(lambda: cancellation.is_cancelled or self._is_next(ticket))
                if cancellation.is_cancelled:
                    raise Cancelled
                self._num_busy += 1
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def _is_next(self, ticket: object) -> bool:
        return self._num_busy < self._size and self._waiting[0] is ticket

    def _take(self) -> _Child:
        """An idle process that still lives, or a new one. Raises ChildFailed."""
        while True:
            with self._changed:
                idle = self._idle.pop()[1] if self._idle else None
            if idle is None:
                return _Child(self._command, self._memory_bytes)
            if idle.is_alive:
                return idle
            idle.end()

    def _give_back(self, child: _Child | None) -> None:
        with self._changed:
            self._num_busy -= 1
            if child is not None and not self._is_closed:
                self._idle.append((time.monotonic(), child))
                child = None
            self._watch_spare()
            self._changed.notify_all()
        if child is not None:
            child.end()

    def _watch_spare(self) -> None:
        """Look again in a while, if there is more than one idle process. To be called locked."""
        if len(self._idle) > 1 and self._reaper is None:
            self._reaper = threading.Timer(_IDLE_SECONDS + 1, self._end_spare)
            self._reaper.daemon = True
            self._reaper.start()

    def _end_spare(self) -> None:
        """End what has been idle for long, but for the one that worked last."""
        oldest_use = time.monotonic() - _IDLE_SECONDS
        with self._changed:
            spare = [entry for entry in self._idle[:-1] if entry[0] < oldest_use]
            self._idle = [entry for entry in self._idle if entry not in spare]
            self._reaper = None
            self._watch_spare()
        for _, child in spare:
            child.end()


class _Child:
    """One process. Raises ChildNotStarted."""

    def __init__(self, command: list[str], memory_bytes: int | None) -> None:
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=launch.environment(),
                cwd=launch.FOLDER,
                start_new_session=True,  # a terminal's Ctrl-C is for the front alone
            )
        except OSError as error:
            raise ChildNotStarted(f"can't be started: {error.strerror}") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        for pipe in (self._stdin, self._stdout):
            os.set_blocking(pipe, False)
            if sys.platform == "linux":
                with contextlib.suppress(OSError):  # a user's pipes may hold so much together
                    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._bound = MemoryBound(self._process.pid, memory_bytes) if memory_bytes else None
        self._deadline = math.inf

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(
        self, job: messages.Body, seconds: float, cancellation: Cancellation
    ) -> tuple[bytearray, bool]:
        """Its answer, and whether the process ends after it.

        Raises ChildFailed, ChildTimeout or Cancelled: the process has to be ended then.
        """
        self._deadline = time.monotonic() + seconds
        cancellation.on_cancel(self._process.kill)
        try:
            messages.write(self, job)
            answer, is_retiring = messages.read(self)
        except (OSError, EOFError):
            if cancellation.is_cancelled:
                raise Cancelled from None
            raise ChildFailed(f"ended with status {self._process.wait()}") from None
        finally:
            cancellation.on_cancel(None)
        return answer, is_retiring or cancellation.is_cancelled  # killed right after its answer

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write to its input. Raises ChildTimeout, ChildFailed, OSError."""
        remaining = memoryview(data)
        while remaining:
            self._wait(self._stdin, select.POLLOUT)
            with contextlib.suppress(BlockingIOError):
                remaining = remaining[os.write(self._stdin, remaining) :]

    def flush(self) -> None:
        """Do nothing: nothing is held back."""

    def readinto(self, buffer: memoryview) -> int:
        """Read some of its output; 0 at the end. Raises ChildTimeout, ChildFailed, OSError."""
        self._wait(self._stdout, select.POLLIN)
        return os.readv(self._stdout, [buffer])

    def end(self) -> None:
        """Kill it, and leave nothing behind."""
        with self._process:
            self._process.kill()

    def _wait(self, pipe: int, event: int) -> None:
        """Wait until a pipe is ready, or has ended, within the job's time and memory."""
        poll = select.poll()
        poll.register(pipe, event)
        longest = POLL_SECONDS if self._bound and self._bound.is_needed else threading.TIMEOUT_MAX
        while (seconds_left := self._deadline - time.monotonic()) > 0:
            if self._bound and self._bound.is_exceeded():
                raise ChildFailed("took more memory than it may")
            if poll.poll(1000 * min(seconds_left, longest)):
                return
        raise ChildTimeout
