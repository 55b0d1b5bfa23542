"""Who is with a preparer, and who may go next. Knows requests; knows no thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State
from vlm_server.protocol import Submit


class PreparerQueue:
    """Of requests with media never more than can wait: their pixels take memory.

    Texts take little, and go past them; of videos, which may take long, one goes at a time. An
    aborted request keeps its preparer until that is done.
    """

    def __init__(self, max_preparing: int, max_ready: int) -> None:
        """`max_preparing` of each kind at once; with media, `max_ready` more that did not end."""
        self._max_preparing = max_preparing
        self._max_ready = max_ready
        self._media: set[str] = set()
        self._videos: set[str] = set()
        self._texts: set[str] = set()

    def start(self, requests: Iterable[Request]) -> list[Submit]:
        """Those that a preparer should take now, oldest first; `requests` are all there are."""
        tracked = list(requests)
        waiting = [r for r in tracked if r.state is State.WAITING]
        begun = sum(r.has_media and r.state is not State.WAITING for r in tracked)
        places = min(
            self._max_preparing + self._max_ready - begun, self._max_preparing - len(self._media)
        )
        media = self._without_videos_but_one([r for r in waiting if r.has_media])
        texts = [r for r in waiting if not r.has_media]
        free = self._max_preparing - len(self._texts)
        return [
            *self._begin(self._media, media[: max(places, 0)]),
            *self._begin(self._texts, texts[: max(free, 0)]),
        ]

    def end(self, request_id: str) -> None:
        """A preparer is done with a request."""
        for kind in (self._media, self._videos, self._texts):
            kind.discard(request_id)

    @property
    def request_ids(self) -> set[str]:
        return self._media | self._texts

    def _without_videos_but_one(self, waiting: list[Request]) -> list[Request]:
        """`waiting` without the videos that shall wait for another one."""
        videos = [request for request in waiting if request.has_video]
        later = videos if self._videos else videos[1:]
        return [request for request in waiting if request not in later]

    def _begin(self, kind: set[str], requests: list[Request]) -> Iterator[Submit]:
        for request in requests:
            request.move_to(State.PREPARING)
            kind.add(request.request_id)
            if request.has_video:
                self._videos.add(request.request_id)
            assert request.submit is not None
            yield request.submit
