"""CPU time of the code under test, independent of other load."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


class ProcessorTime:
    """Seconds of processor time, once the block has ended."""

    seconds: float


@contextmanager
def processor_time() -> Iterator[ProcessorTime]:
    """Measure this thread alone.

    No garbage is collected meanwhile, which takes the longer the more tests there were.
    """
    measured = ProcessorTime()
    gc.disable()
    start = time.thread_time()
    try:
        yield measured
    finally:
        measured.seconds = time.thread_time() - start
        gc.enable()
