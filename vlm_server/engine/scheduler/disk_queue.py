"""Whose state the disk reader reads: of one request at a time."""

from __future__ import annotations

from collections.abc import Iterable

from vlm_server.engine.request.request import Request
from vlm_server.interfaces import LoadWork
from vlm_server.platform.child.cancellation import Cancellation


class DiskQueue:
    """Changes no request. What is read may be of one that has ended since."""

    def __init__(self) -> None:
        self.loading: LoadWork | None = None
        """What the disk reader has."""

    def start(self, waiting: Iterable[Request]) -> LoadWork | None:
        """What to read next, of the first of `waiting`; None while something is being read."""
        request = next(iter(waiting), None)
        if self.loading is not None or request is None or request.load is None:
            return None
        self.loading = LoadWork(request.request_id, request.load, Cancellation())
        return self.loading

    def cancel(self, request_id: str) -> None:
        """Nobody waits for it any more. One that is not being read is no error."""
        if self.loading is not None and self.loading.request_id == request_id:
            self.loading.cancellation.cancel()

    def end(self) -> None:
        """The disk reader is done."""
        self.loading = None
