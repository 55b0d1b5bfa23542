"""A pool of processes for work on untrusted bytes: one job at a time, with a deadline.

A job may hang, crash, or take all memory: then that job fails, its process is killed, and a new
process takes the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import subprocess
import sys
import threading
import time
from collections import deque
from typing import Any

from vlm_server.platform.child import launch, messages
from vlm_server.platform.child.cancellation import Cancellation, Cancelled
from vlm_server.platform.footprint import POLL_SECONDS, MemoryBound

_IDLE_SECONDS = 30.0
_PIPE_BYTES = 1 << 20


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

    @property
    def num_idle(self) -> int:
        """Processes that wait for a job."""
        with self._changed:
            return len(self._idle)

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
        kept: _Child | None = None
        try:
            child = self._take()
            kept = child
            answer, is_retiring = child.ask(job, seconds, cancellation)
            if is_retiring:
                kept = None
                child.end()
        except BaseException:
            if kept is not None:
                kept.end()
                kept = None
            raise
        finally:
            self._give_back(kept)
        return answer

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
        before = time.monotonic() - _IDLE_SECONDS
        with self._changed:
            spare = [entry for entry in self._idle[:-1] if entry[0] < before]
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
        _widen(self._process.stdin, self._process.stdout)
        self._bound = MemoryBound(self._process.pid, memory_bytes) if memory_bytes else None

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(
        self, job: messages.Body, seconds: float, cancellation: Cancellation
    ) -> tuple[bytearray, bool]:
        """Its answer, and whether the process ends after it."""
        watch = _Watch(self._process, seconds, self._bound)
        cancellation.on_cancel(self._process.kill)
        stdin: Any = self._process.stdin
        stdout: Any = self._process.stdout
        try:
            messages.write(stdin, job)
            answer, is_retiring = messages.read(stdout)
        except (OSError, EOFError):
            if cancellation.is_cancelled:
                raise Cancelled from None
            if watch.is_late:
                raise ChildTimeout from None
            if watch.is_too_large:
                raise ChildFailed("took more memory than it may") from None
            raise ChildFailed(f"ended with status {self._process.wait()}") from None
        finally:
            watch.end()
            cancellation.on_cancel(None)
        # It may have been killed right after its answer.
        return answer, is_retiring or watch.has_killed or cancellation.is_cancelled

    def end(self) -> None:
        """Kill it, and leave nothing behind."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # the rest of a job can't be written any more
                pipe.close()  # type: ignore[union-attr]
        self._process.wait()


class _Watch:
    """Kills a process that works for more than `seconds`, or outgrows its bound, until `end`."""

    def __init__(
        self, process: subprocess.Popen[bytes], seconds: float, bound: MemoryBound | None
    ) -> None:
        self.is_late = False
        self.is_too_large = False
        self._process = process
        self._bound = bound if bound and bound.is_needed else None
        self._deadline = time.monotonic() + seconds
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    @property
    def has_killed(self) -> bool:
        return self.is_late or self.is_too_large

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        longest = POLL_SECONDS if self._bound else threading.TIMEOUT_MAX
        while (left := self._deadline - time.monotonic()) > 0:
            if self._is_over.wait(min(left, longest)):
                return
            if self._bound and self._bound.is_exceeded():
                self.is_too_large = True
                self._process.kill()
                return
        self.is_late = True
        self._process.kill()


def _widen(*pipes: Any) -> None:
    """Let each pipe hold more than 64 KiB: with less, both ends wait for each other all the time.

    On a busy machine, each time takes as long as others work.
    """
    if sys.platform == "linux":
        for pipe in pipes:
            with contextlib.suppress(OSError):  # a user's pipes may hold so much together
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
