"""The process that decodes images: `python -m vlm_server.prompt.media.image_process BYTES SECONDS`.

Its arguments are its limits: bytes of address space, and seconds of CPU time for an image. It
decodes one image after the other, and ends when it has held much memory. Needs Pillow alone.
"""

from __future__ import annotations

import logging
import sys
import warnings

from vlm_server.errors import InvalidImage
from vlm_server.platform import heap
from vlm_server.platform.child.messages import Parts
from vlm_server.platform.child.serve import Limits, serve
from vlm_server.prompt.media.image_messages import pack, pack_refusal, unpack_job
from vlm_server.prompt.media.images import decode_rgb

_RETIRE_BYTES = 256 << 20


def main() -> None:
    heap.keep_images()
    warnings.simplefilter("ignore")  # Pillow's, about what clients sent, would fill the log
    memory_bytes, job_seconds = int(sys.argv[1]), float(sys.argv[2])
    serve(_answer, Limits(memory_bytes, job_seconds, _RETIRE_BYTES))


def _answer(job: bytearray) -> Parts:
    try:
        return pack(decode_rgb(unpack_job(job)))
    except InvalidImage as error:
        return pack_refusal(error.message)
    except MemoryError:
        return pack_refusal("decoding the picture takes too much memory")
    except Exception:  # hostile bytes raise almost anything
        logging.getLogger(__name__).debug("decoding failed", exc_info=True)
        return pack_refusal("the picture can't be decoded")


if __name__ == "__main__":
    main()
