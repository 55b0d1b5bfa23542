"""The child's side of a pool: answers one job after the other until its standard input ends.

The process exits as soon as that is closed, even in the middle of a job.
"""

from __future__ import annotations

import math
import os
import resource
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from queue import SimpleQueue

from vlm_server.platform.child import messages
from vlm_server.platform.footprint import be_killed_first

_NICENESS = 5
"""Answers that are being written come first."""
_OOM_SCORE = 900


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """Limits of one process: bytes of address space (on macOS its pool checks them), CPU seconds of
    a job, and the most memory with which it is kept for another job.
    """

    memory_bytes: int
    job_seconds: float
    retire_bytes: int


def serve(answer: Callable[[bytearray], messages.Body], limits: ChildLimits) -> None:
    """Answer jobs with `answer`, which must not raise, until the input ends."""
    jobs = os.fdopen(os.dup(0), "rb", buffering=0)  # a lock of its own would outlive its thread
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not be taken for an answer
    os.nice(_NICENESS)
    _limit_memory(limits)
    received = SimpleQueue[bytearray]()
    threading.Thread(target=_receive, args=(jobs, received), daemon=True).start()
    while True:
        job = received.get()
        _limit_job(limits)
        answer_parts = answer(job)
        del job
        try:
            messages.write(answers, answer_parts, flag=_peak_bytes() > limits.retire_bytes)
        except BrokenPipeError:
            return
        del answer_parts


def _receive(jobs: FileIO, received: SimpleQueue[bytearray]) -> None:
    """Read jobs on a thread of its own, to notice the end of the input during a job."""
    try:
        while True:
            received.put(messages.read(jobs)[0])
    finally:
        os._exit(1)


def _limit_memory(limits: ChildLimits) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    be_killed_first(score=_OOM_SCORE)  # before the process that it works for


def _limit_job(limits: ChildLimits) -> None:
    """Limit the CPU time of a job, in case the pool's process has died."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds = math.ceil(usage.ru_utime + usage.ru_stime + limits.job_seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))


def _peak_bytes() -> int:
    """The most memory that this process ever held.

    On Linux, `ru_maxrss` begins with what the starting process held, and is in KiB.
    """
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for line in Path("/proc/self/status").read_bytes().splitlines():
        if line.startswith(b"VmHWM:"):
            return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
