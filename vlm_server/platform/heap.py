"""The C library's heap in processes that run for months. For glibc, and `trim` also for a preloaded
mimalloc; elsewhere the functions do nothing.

By default, each thread has a heap of its own, which keeps freed memory out of the reach of
trimming, and blocks of 128 KiB and more are mapped anew each time. The system has to clear their
pages then: for the 2 MB of a screenshot that takes longer than to copy or to decode it.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_HUGE_BYTES = 4 << 20
"""More than the 2.1 MB that OpenBLAS takes for each product of matrices, and then frees."""

_IMAGE_BYTES = 32 << 20
"""The largest block that glibc takes from the heap."""


def share_one_heap() -> None:
    """Let all threads take blocks of less than 4 MiB from one heap, all of which `trim` reaches.

    For processes that allocate such blocks all the time: up to 16 MiB of freed memory stay for
    reuse, and larger blocks leave no holes. To be called before there are other threads.
    """
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_MMAP_THRESHOLD, _HUGE_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, 4 * _HUGE_BYTES)


def keep_images() -> None:
    """Keep up to 48 MiB of freed memory for the next image, in blocks of up to 32 MiB.

    For processes that only decode images: to allocate a 1-megapixel image anew takes as long as
    decoding it.
    """
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, _IMAGE_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, 3 * _IMAGE_BYTES // 2)


def keep_bodies() -> None:
    """Keep up to 48 MiB of freed memory for the next request, whichever thread reads it.

    For processes that receive bodies with images, and trim the heap when idle. To be called before
    there are other threads.
    """
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_ARENA_MAX, 1)
        keep_images()


def free_bytes() -> int:
    """Free memory that the heap holds, in bytes; 0 without glibc."""
    libc = _glibc()
    return int(libc.mallinfo2().free_bytes) if libc is not None else 0


def trim() -> None:
    """Give back to the system what is free now; takes milliseconds."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)
        if hasattr(libc, "mi_collect"):
            libc.mi_collect(ctypes.c_bool(True))


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = (
        *((f"_{number}", ctypes.c_size_t) for number in range(8)),
        ("free_bytes", ctypes.c_size_t),
        ("_last", ctypes.c_size_t),
    )


@cache
def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    if not all(hasattr(libc, name) for name in ("malloc_trim", "mallopt", "mallinfo2")):
        return None
    libc.mallinfo2.restype = _MallInfo
    return libc
