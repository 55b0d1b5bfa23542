"""The process that decodes a video: `python -m vlm_server.prompt.video.process BYTES SECONDS`.

Its arguments are its limits: bytes of address space, seconds of CPU time. One process decodes one
video, so that nothing of it is left for the next.
"""

from __future__ import annotations

import logging
import sys

from vlm_server.platform.child.messages import Parts
from vlm_server.platform.child.serve import Limits, serve
from vlm_server.prompt.video.decoding import Unreadable, decode
from vlm_server.prompt.video.messages import Frames, Job, Refused, pack, unpack_job


def main() -> None:
    memory_bytes, job_seconds = int(sys.argv[1]), float(sys.argv[2])
    serve(_answer, Limits(memory_bytes, job_seconds, retire_bytes=0))


def _answer(packed: bytearray) -> Parts:
    try:
        return _decode(unpack_job(packed))
    except Unreadable as error:
        reason = str(error)
    except Exception:  # hostile bytes raise almost anything
        logging.getLogger(__name__).debug("decoding failed", exc_info=True)
        reason = "The video can't be decoded."
    return pack(Refused(reason), ())


def _decode(job: Job) -> Parts:
    decoded = decode(job)
    shown = decoded.frames
    first = shown[0]
    seconds = tuple(frame.seconds for frame in shown)
    turns = tuple(frame.quarter_turns for frame in shown)
    frames = Frames(first.width, first.height, seconds, turns, decoded.is_cut)
    return pack(frames, [frame.rgb for frame in shown])


if __name__ == "__main__":
    main()
