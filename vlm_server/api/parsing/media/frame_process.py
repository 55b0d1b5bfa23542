"""The process that reads frames: `python -m vlm_server.api.parsing.media.frame_process ...`.

Arguments: bytes of address space, CPU seconds of a frame, pixels of a frame. A job is the bytes of
a frame, its answer `FrameFacts` or an error.
"""

from __future__ import annotations

import sys
import warnings

import msgspec

from vlm_server.api.parsing.media import frame
from vlm_server.api.parsing.media.external import SentError
from vlm_server.api.parsing.media.frame import FrameFacts
from vlm_server.errors import InvalidImage, RequestError
from vlm_server.platform.child.serve import ChildLimits, serve

_RETIRE_BYTES = 256 << 20


def main(memory_bytes: str, job_seconds: str, max_pixels: str) -> None:
    warnings.simplefilter("ignore")  # Pillow's, about clients' images, would fill the log

    def answer(job: bytearray) -> bytes:
        outcome: FrameFacts | SentError
        try:
            outcome = frame.read(bytes(job), int(max_pixels))
        except RequestError as error:
            outcome = SentError(error.code, error.message, error.param)
        except MemoryError:
            text = "Decoding the frame takes too much memory."
            outcome = SentError(InvalidImage.code, text, "frame")
        return msgspec.msgpack.encode(outcome)

    serve(answer, ChildLimits(int(memory_bytes), float(job_seconds), _RETIRE_BYTES))


if __name__ == "__main__":
    main(*sys.argv[1:])
