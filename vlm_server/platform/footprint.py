"""Memory of a process as the system counts it, and a bound on that of another process."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import time
from pathlib import Path

from vlm_server.platform import heap

POLL_SECONDS = 0.1
"""The interval of checks of a bounded process."""
_PROC_PID_RUSAGE_V0 = 0
_PROC = Path("/proc")


class _RusageInfoV0(ctypes.Structure):
    """`struct rusage_info_v0` of macOS's <sys/resource.h>."""

    _fields_ = (
        ("ri_uuid", ctypes.c_uint8 * 16),
        ("ri_user_time", ctypes.c_uint64),
        ("ri_system_time", ctypes.c_uint64),
        ("ri_pkg_idle_wkups", ctypes.c_uint64),
        ("ri_interrupt_wkups", ctypes.c_uint64),
        ("ri_pageins", ctypes.c_uint64),
        ("ri_wired_size", ctypes.c_uint64),
        ("ri_resident_size", ctypes.c_uint64),
        ("ri_phys_footprint", ctypes.c_uint64),
        ("ri_proc_start_abstime", ctypes.c_uint64),
        ("ri_proc_exit_abstime", ctypes.c_uint64),
    )


class MemoryBound:
    """A bound on the memory of another process on macOS, which does not obey RLIMIT_AS.

    The process may exceed the bound for POLL_SECONDS.
    """

    def __init__(self, pid: int, most_bytes: int, *, beyond_now: bool = False) -> None:
        """most_bytes: in all, or `beyond_now`, in addition to its present memory."""
        self._pid = pid
        self.is_needed = sys.platform != "linux"
        held_bytes = footprint_bytes(pid) if beyond_now and self.is_needed else 0
        self._most_bytes = held_bytes + most_bytes
        self._next = 0.0

    def is_exceeded(self) -> bool:
        """Whether the process has outgrown its bound, checked at most once in POLL_SECONDS."""
        now = time.monotonic()
        if not self.is_needed or now < self._next:
            return False
        self._next = now + POLL_SECONDS
        return footprint_bytes(self._pid) > self._most_bytes


def footprint_bytes(pid: int | None = None) -> int:
    """`phys_footprint` on macOS, which its memory pressure goes by; resident memory on Linux.

    Of this process, or that of the same user with this number; 0 where it can't be read.
    """
    pid = pid or os.getpid()
    try:
        return _on_macos(pid) if sys.platform == "darwin" else _on_linux(pid)
    except (OSError, ValueError, IndexError):
        return 0


def _on_linux(pid: int) -> int:
    statm = _PROC / f"{pid}/statm"
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _on_macos(pid: int) -> int:
    libproc = ctypes.CDLL("/usr/lib/libproc.dylib", use_errno=True)
    info = _RusageInfoV0()
    if libproc.proc_pid_rusage(pid, _PROC_PID_RUSAGE_V0, ctypes.byref(info)):
        raise OSError(ctypes.get_errno(), "proc_pid_rusage")
    return int(info.ri_phys_footprint)


logger = logging.getLogger(__name__)

_OOM_SCORE = Path("/proc/self/oom_score_adj")
_OOM_SCORE_ADJ = 500
"""Out of 1,000: counts as half of the machine's memory more than the process takes."""


def be_killed_first(path: Path = _OOM_SCORE, score: int = _OOM_SCORE_ADJ) -> None:
    """Have Linux kill this process, and those it starts, before others when memory runs out.

    The front then starts another engine. Killed itself, it would take everything with it.
    """
    if sys.platform != "linux":
        return
    try:
        if int(path.read_text()) < score:
            path.write_text(str(score))
    except (OSError, ValueError) as error:
        logger.debug("can't raise oom_score_adj: %s", error)


class SystemProcessMemory:
    """The `ProcessMemory` of this process."""

    def footprint_bytes(self) -> int:
        return footprint_bytes()

    def trim(self) -> None:
        heap.trim()
