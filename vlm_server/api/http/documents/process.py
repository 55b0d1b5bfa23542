"""The process that draws pages: one job, and the next one is another process's.

PDFium is a large program in C++ that reads what clients send. So nothing of a document outlives its
job, nor is there anything of another's in the process. Started by `drawing`.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import time
import warnings

from vlm_server.api.http.documents import messages, page_ranges
from vlm_server.api.http.documents.messages import DrawJob, Drawn
from vlm_server.api.http.documents.readers import DocumentError, PageReader, open_document
from vlm_server.api.outcomes import serve_outcomes
from vlm_server.api.parsing.media.documents import PageImage
from vlm_server.errors import InvalidDocument
from vlm_server.platform.child.serve import ChildLimits

SLICE_SECONDS = 2.0
"""Time after which the pages drawn so far are sent."""
_SLICE_BYTES = 32 << 20
_COMPRESSION = 1
"""Of zlib: a page is decoded once more, so speed counts for more than size."""


def main(memory_bytes: int, job_seconds: float) -> None:
    # What libraries say of clients' files would fill the log.
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    serve_outcomes(answer, ChildLimits(memory_bytes, job_seconds, 0))


def answer(job_bytes: bytearray) -> Drawn:
    """The pages of an encoded job. Raises InvalidDocument."""
    job = messages.decode_job(job_bytes)
    try:
        return _draw(job)
    except (DocumentError, page_ranges.PagesError) as error:
        message = str(error)
    except MemoryError:
        message = "The document takes too much memory (document.max_draw_memory_bytes)."
    except Exception:  # hostile bytes raise almost anything
        logging.getLogger(__name__).debug("drawing failed", exc_info=True)
        message = "The document can't be read."
    raise InvalidDocument(message, job.document.param)


def _draw(job: DrawJob) -> Drawn:
    started, document, images = time.monotonic(), job.document, list[PageImage]()
    reader = open_document(document, job.max_source_pixels)
    num_pages, num_bytes = reader.num_pages(), 0
    if num_pages < 1:
        raise DocumentError("The document has no pages.")
    numbers = page_ranges.select(document.options.pages, num_pages, job.max_pages)
    for number in sorted(set(numbers) - set(job.skipped)):
        images.append(_page(reader, number, job))
        num_bytes += len(images[-1].png)
        if time.monotonic() - started > SLICE_SECONDS or num_bytes > _SLICE_BYTES:
            break
    return Drawn(num_pages, tuple(images), time.monotonic() - started)


def _page(reader: PageReader, number: int, job: DrawJob) -> PageImage:
    pixels = reader.draw(number, job.size)
    text = reader.text(number) if job.document.options.include_text else ""
    png = io.BytesIO()
    pixels.save(png, "PNG", compress_level=_COMPRESSION)
    return PageImage(number, png.getvalue(), *pixels.size, text)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
