"""The process that decodes media: `python -m vlm_server.prompt.media.process KIND BYTES SECONDS`.

KIND is `image` or `video`; the others are limits: bytes of address space, and CPU seconds of a job.
A process decodes images until it has held much memory, or one video.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable

from vlm_server.errors import RequestError
from vlm_server.platform import heap
from vlm_server.platform.child.messages import Parts
from vlm_server.platform.child.serve import ChildLimits, serve
from vlm_server.prompt.media.messages import Undecodable, pack

_RETIRE_BYTES = {"image": 256 << 20, "video": 0}
_FAILED = {"image": "the image can't be decoded", "video": "The video can't be decoded."}


def main() -> None:
    kind, memory_bytes, job_seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    if kind == "image":
        from vlm_server.prompt.media.images import decode_job

        heap.keep_images()
        warnings.simplefilter("ignore")  # Pillow's, about clients' images, would fill the log
    else:
        from vlm_server.prompt.media.videos import decode_job
    limits = ChildLimits(memory_bytes, job_seconds, _RETIRE_BYTES[kind])
    serve(lambda job: _answer(decode_job, job, _FAILED[kind]), limits)


def _answer(decode: Callable[[bytearray], Parts], job: bytearray, failure: str) -> Parts:
    try:
        return decode(job)
    except RequestError as error:
        return pack(Undecodable(error.message))
    except Exception:  # hostile bytes raise almost anything
        logging.getLogger(__name__).debug("decoding failed", exc_info=True)
        return pack(Undecodable(failure))


if __name__ == "__main__":
    main()
