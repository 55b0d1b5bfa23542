"""A process for the tests of `FairPool`: a job names what becomes of it."""

from __future__ import annotations

import os
import sys
import time

from msgspec import Struct

from vlm_server.api.outcomes import serve_outcomes
from vlm_server.errors import InvalidImage, RequestTooCostly
from vlm_server.platform.child.serve import ChildLimits


class Told(Struct, frozen=True, tag=True):
    """A job, and the argument after the bytes of memory."""

    job: bytes
    argument: str


def work(job: bytearray) -> Told:
    match bytes(job):
        case b"refuse":
            raise InvalidImage("It is no image.", "frame")
        case b"hog":
            raise MemoryError
        case b"die":
            os._exit(3)
        case b"sleep":
            time.sleep(30)
        case b"nap":
            time.sleep(0.2)
    return Told(bytes(job), sys.argv[2])


if __name__ == "__main__":
    no_memory = RequestTooCostly("It takes too much memory.", "body")
    serve_outcomes(work, ChildLimits(int(sys.argv[1]), 60, 1 << 30), no_memory)
