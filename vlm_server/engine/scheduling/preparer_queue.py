"""Which requests a preparer thread takes next, and which ones have one."""

from __future__ import annotations

from collections.abc import Iterable

from vlm_server.child.cancellation import Cancellation
from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State


class PreparerQueue:
    """Limits how many requests are prepared at once. Changes no request.

    With media, never more than can wait: their pixels take memory. Texts take little, and pass
    them; of videos, which may take long, one is prepared at a time. A request that was aborted
    keeps its thread until that is done.
    """

    def __init__(self, max_preparing: int, max_ready: int) -> None:
        """`max_preparing` of each kind at once; with media, `max_ready` more that did not end."""
        self._max_preparing = max_preparing
        self._max_ready = max_ready
        self._media: set[str] = set()
        self._videos: set[str] = set()
        self._texts: set[str] = set()
        self._cancellations: dict[str, Cancellation] = {}

    @property
    def request_ids(self) -> frozenset[str]:
        """Of the requests that a thread has."""
        return frozenset(self._cancellations)

    def next(self, requests: Iterable[Request]) -> list[Request]:
        """Those that a thread should take now, in order; `requests` are all there are, by turns."""
        tracked = list(requests)
        waiting = [r for r in tracked if r.state is State.WAITING]
        begun = sum(r.has_media and r.state is not State.WAITING for r in tracked)
        room = min(
            self._max_preparing + self._max_ready - begun, self._max_preparing - len(self._media)
        )
        media = self._with_one_video([r for r in waiting if r.has_media])
        texts = [r for r in waiting if not r.has_media]
        free = self._max_preparing - len(self._texts)
        return [*media[: max(room, 0)], *texts[: max(free, 0)]]

    def start(self, request: Request) -> Cancellation:
        """A thread takes `request`; what tells it to stop."""
        (self._media if request.has_media else self._texts).add(request.request_id)
        if request.has_video:
            self._videos.add(request.request_id)
        cancellation = self._cancellations[request.request_id] = Cancellation()
        return cancellation

    def cancel(self, request_id: str) -> None:
        """Nobody waits for it any more. One that no thread has is no error."""
        if cancellation := self._cancellations.get(request_id):
            cancellation.cancel()

    def end(self, request_id: str) -> None:
        """The thread is done with a request."""
        del self._cancellations[request_id]
        for kind in (self._media, self._videos, self._texts):
            kind.discard(request_id)

    def _with_one_video(self, waiting: list[Request]) -> list[Request]:
        """`waiting` without the videos that have to wait for another one."""
        videos = [request for request in waiting if request.has_video]
        later = videos if self._videos else videos[1:]
        return [request for request in waiting if request not in later]
