"""The C library's heap of a process that runs for months. Knows glibc; elsewhere it does nothing.

By default, glibc raises its mmap threshold when a large block is freed, so that the next block of
that size comes from the heap, between small blocks that stay. A server that receives large bodies
grows by that, and never shrinks. Also, each thread's own heap retains twice that size at its end,
which trimming does not reach.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGE_BYTES = 256 << 10
_HUGE_BYTES = 4 << 20
"""More than the 2.1 MB that OpenBLAS takes for each product of matrices, and then frees."""

_IMAGE_BYTES = 32 << 20
"""The largest block that glibc takes from the heap."""


def keep_large_blocks_apart() -> None:
    """Let blocks of 256 KiB and more go back to the system as soon as they are freed.

    Nor does a thread's heap keep more than 128 KiB at its end: both bounds stay what they are.
    """
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def share_one_heap() -> None:
    """Let all threads take blocks of less than 4 MiB from one heap, all of which `trim` reaches.

    For who takes and frees such blocks all the time: up to 16 MiB that were freed are there for
    the next, and larger blocks leave no holes. To be called before there are other threads.
    """
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_MMAP_THRESHOLD, _HUGE_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, 4 * _HUGE_BYTES)


def keep_images() -> None:
    """Let up to 48 MiB that were freed be there for the next image, in blocks of up to 32 MiB.

    For who does nothing else than decode images: taking the memory of a 1-megapixel one anew takes
    as long as decoding it.
    """
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, _IMAGE_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, 3 * _IMAGE_BYTES // 2)


def trim() -> None:
    """Give back to the system what is free now; takes milliseconds."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    """None where the C library is another one."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None
