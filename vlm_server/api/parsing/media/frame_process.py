"""The process that reads frames: `python -m vlm_server.api.parsing.media.frame_process ...`.

Arguments: bytes of address space, CPU seconds of a frame, pixels of a frame. A job is the bytes of
a frame, its answer `FrameFacts` or an error.
"""

from __future__ import annotations

import sys
import warnings

from vlm_server.api.outcomes import serve_outcomes
from vlm_server.api.parsing.media import frame
from vlm_server.errors import InvalidImage
from vlm_server.platform.child.serve import ChildLimits

_RETIRE_BYTES = 256 << 20


def main(memory_bytes: str, job_seconds: str, max_pixels: str) -> None:
    warnings.simplefilter("ignore")  # Pillow's, about clients' images, would fill the log
    serve_outcomes(
        lambda job: frame.read(bytes(job), int(max_pixels)),
        ChildLimits(int(memory_bytes), float(job_seconds), _RETIRE_BYTES),
        InvalidImage("Decoding the frame takes too much memory.", "frame"),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
