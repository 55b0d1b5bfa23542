"""A batch whose lines are being run: which wait, and which run."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable

import msgspec

from vlm_server.api.batches.batch import Batch, Counted, new_id
from vlm_server.api.batches.lines import LineFile
from vlm_server.api.batches.request import Reply

_MAX_ATTEMPTS = 3
_OVERLOADED = frozenset({429, 502, 503, 504, 507})
_UNAVAILABLE = b'"engine_unavailable"'


class Run:
    """The lines of `batch` that have no result yet. Used from the event loop only."""

    def __init__(self, batch: Batch, file: LineFile, done: Iterable[int]) -> None:
        self.file = file
        done = set(done)
        self.waiting = deque(index for index in range(len(file)) if index not in done)
        self.running: dict[int, asyncio.Event] = {}
        """What interrupts each running line."""
        self.owner = batch.owner
        self._num_bytes = batch.num_bytes
        self._attempts = Counter[int]()

    def begin(self) -> tuple[int, asyncio.Event]:
        """The next line, which now runs."""
        index, interrupted = self.waiting.popleft(), asyncio.Event()
        self.running[index] = interrupted
        return index, interrupted

    def put_back(self, index: int) -> None:
        """A running line waits again."""
        self.waiting.appendleft(index)

    def interrupt(self) -> None:
        for interrupted in self.running.values():
            interrupted.set()

    def may_retry(self, index: int, reply: Reply) -> bool:
        """Whether a failed line is to be run again; a server that isn't ready is no attempt."""
        if reply.status not in _OVERLOADED:
            return False
        if _UNAVAILABLE in reply.body:
            return True
        self._attempts[index] += 1
        return self._attempts[index] < _MAX_ATTEMPTS

    def result(self, custom_id: str, reply: Reply, max_bytes: int) -> tuple[Counted, bytes]:
        """The line of an output or error file for `reply`, or an error if it has no room."""
        body = msgspec.Raw(bytes(reply.body).replace(b"\n", b" "))
        response = {"status_code": reply.status, "request_id": reply.request_id, "body": body}
        kind: Counted = "completed" if reply.status == 200 else "failed"
        data = _encode(custom_id, response, None)
        if self._num_bytes + len(data) > max_bytes:
            text = f"The results have more than {max_bytes} bytes (batches.max_output_bytes)."
            kind, data = "failed", failure(custom_id, "output_too_large", text)
        self._num_bytes += len(data)
        return kind, data


def failure(custom_id: str, code: str, message: str) -> bytes:
    """The line of an error file for a request without a response."""
    return _encode(custom_id, None, {"code": code, "message": message})


def _encode(custom_id: str, response: object, error: object) -> bytes:
    return msgspec.json.encode(
        {
            "id": new_id("batch_req_"),
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
    )
