"""What the system says that this process takes. Knows each system's own figure."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_PROC_PID_RUSAGE_V0 = 0
_STATM = Path("/proc/self/statm")


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


def footprint_bytes() -> int:
    """`phys_footprint` on macOS, which its memory pressure goes by; resident memory on Linux.

    0 where neither can be read.
    """
    try:
        return _on_macos() if sys.platform == "darwin" else _on_linux(_STATM)
    except (OSError, ValueError, IndexError):
        return 0


def _on_linux(statm: Path) -> int:
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _on_macos() -> int:
    libproc = ctypes.CDLL("/usr/lib/libproc.dylib", use_errno=True)
    info = _RusageInfoV0()
    if libproc.proc_pid_rusage(os.getpid(), _PROC_PID_RUSAGE_V0, ctypes.byref(info)):
        raise OSError(ctypes.get_errno(), "proc_pid_rusage")
    return int(info.ri_phys_footprint)
