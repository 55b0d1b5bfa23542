"""The process that decodes one video: `python -m vlm_server.video.process`.

Reads a `Job` from its standard input, writes the answers to its standard output, and exits. It
exits at once when its standard input is closed, since nobody waits for the answer then.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
import threading
from typing import BinaryIO

from vlm_server.settings import Video as Limits
from vlm_server.video.decoding import Unreadable, decode
from vlm_server.video.messages import Done, Job, Refused, read_job, write

_NICENESS = 5  # requests that are decoding tokens come first


def main() -> None:
    job = read_job(sys.stdin.buffer)
    threading.Thread(target=_end_with, args=(sys.stdin.buffer,), daemon=True).start()
    os.nice(_NICENESS)
    _limit_resources(job.limits)
    _answer(job, sys.stdout.buffer)
    os._exit(0)  # the other thread still reads


def _answer(job: Job, pipe: BinaryIO) -> None:
    try:
        for frame in decode(job):
            write(pipe, frame)
        write(pipe, Done())
    except BrokenPipeError:
        return
    except Unreadable as error:
        write(pipe, Refused(str(error)))
    except Exception:  # hostile bytes raise almost anything
        logging.getLogger(__name__).debug("decoding failed", exc_info=True)
        write(pipe, Refused("The video can't be decoded."))


def _end_with(pipe: BinaryIO) -> None:
    pipe.read()
    os._exit(1)


def _limit_resources(limits: Limits) -> None:
    """Limits that hold even if nobody is left to kill this process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    cpu_seconds = 2 * int(limits.decode_timeout_seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    if sys.platform == "linux":
        size = limits.decode_memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


if __name__ == "__main__":
    main()
