"""The preparer, disk reader and encoder threads.

They get work from a plan, and post exactly one result for each piece to the loop's inbox.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from vlm_server.cache.caches import Caches
from vlm_server.cache.disk.tier import DiskReadResult
from vlm_server.engine.encoding import encode
from vlm_server.engine.inbox import DiskReadDone, Inbox, PrepareDone
from vlm_server.errors import InternalError, RequestError
from vlm_server.interfaces import DiskReadWork, Encoder, EncodeWork, Prepared, Preparer, PrepareWork
from vlm_server.platform.child.cancellation import Cancelled
from vlm_server.protocol import Submit

logger = logging.getLogger(__name__)


def _start_pool(num_threads: int, name: str) -> ThreadPoolExecutor:
    """A pool with running threads: a late failure to start one would end the inference thread."""
    threads, all_run = ThreadPoolExecutor(num_threads, name), threading.Barrier(num_threads + 1)
    for _ in range(num_threads):
        threads.submit(all_run.wait)
    all_run.wait()
    return threads


class PreparerThreads:
    """Preparer threads: `num_threads` each for requests with media, with a schema, and others.

    Media get at least two, so that a request with few pixels need not wait for one with many.
    """

    def __init__(self, preparer: Preparer, inbox: Inbox, num_threads: int) -> None:
        self._preparer = preparer
        self._inbox = inbox
        self._media = _start_pool(max(num_threads, 2), "preparer")
        self._texts = _start_pool(num_threads, "tokenizer")
        self._schemas = _start_pool(num_threads, "schema")
        self._lock = threading.Lock()
        self._num_started = 0

    @property
    def num_tracked(self) -> int:
        """The number of requests and media in preparation."""
        with self._lock:
            return self._num_started + self._preparer.num_tracked

    def start(self, work: PrepareWork) -> None:
        with self._lock:
            self._num_started += 1
        self._threads_for(work.submit).submit(self._prepare, work)

    def _threads_for(self, submit: Submit) -> ThreadPoolExecutor:
        """The threads for the request's kind: no kind waits for another's threads."""
        if submit.has_media:
            return self._media
        return self._schemas if submit.has_schema else self._texts

    def _prepare(self, work: PrepareWork) -> None:
        outcome: Prepared | RequestError
        request_id, started_at = work.submit.request_id, time.perf_counter()
        try:
            outcome = self._preparer.prepare(work.submit, work.cancellation, use_disk=work.use_disk)
        except RequestError as error:
            outcome = error
        except Cancelled:
            outcome = InternalError("The request was cancelled.")
        except BaseException:  # the request must end; a Rust panic is one, too
            logger.exception("preparing a request failed")
            outcome = InternalError("The request could not be prepared.")
        logger.debug(
            "prepared %s in %.1f ms", request_id, 1000 * (time.perf_counter() - started_at)
        )
        with self._lock:
            self._num_started -= 1
        self._inbox.put(PrepareDone(request_id, outcome))


class DiskReaderThread:
    """A thread that reads the cached parts of prompts from disk, one after the other."""

    def __init__(self, caches: Caches, inbox: Inbox) -> None:
        self._caches = caches
        self._inbox = inbox
        self._thread = _start_pool(1, "disk reader")

    def start(self, work: DiskReadWork) -> None:
        self._thread.submit(self._read, work)

    def _read(self, work: DiskReadWork) -> None:
        started_at = time.perf_counter()
        try:
            result = self._caches.read_disk(work.disk_read, lambda: work.cancellation.is_cancelled)
        except BaseException:  # the request must go on
            logger.exception("reading from disk failed")
            result = DiskReadResult()
        milliseconds = 1000 * (time.perf_counter() - started_at)
        logger.debug("read the cached part of %s in %.1f ms", work.request_id, milliseconds)
        self._inbox.put(DiskReadDone(work.request_id, result))


class EncoderThread:
    """A thread that encodes media, one call after the other."""

    has_parts_left = False

    def __init__(self, encoder: Encoder, inbox: Inbox) -> None:
        self._encoder = encoder
        self._inbox = inbox
        self._thread = _start_pool(1, "encoder")

    def start(self, encodes: Sequence[EncodeWork]) -> None:
        self._thread.submit(self._encode, encodes)

    def advance_encode(self, *, is_alone: bool) -> None:
        """Do nothing: the thread needs no turns."""

    def _encode(self, encodes: Sequence[EncodeWork]) -> None:
        self._inbox.put(encode(self._encoder, encodes))
