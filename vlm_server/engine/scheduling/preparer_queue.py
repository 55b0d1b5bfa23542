"""Which requests a preparer thread takes next, and which ones have one."""

from __future__ import annotations

from collections.abc import Iterable

from vlm_server.child.cancellation import Cancellation
from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State

DEAR_PIXELS = 16_000_000
"""A request with more to decode may take seconds; two 4K screenshots are just below."""


class PreparerQueue:
    """Limits how many requests are prepared at once. Changes no request.

    With media, never more than can wait: their pixels take memory. Texts take little, and pass
    them. Dear requests, with many pixels or a video, never take all threads, and of videos one is
    prepared at a time. Among the others the oldest and the one with the fewest pixels take turns,
    so that nobody waits for ever. A request that was aborted keeps its thread until that is done.
    """

    def __init__(self, max_preparing: int, max_ready: int) -> None:
        """`max_preparing` of each kind at once; with media, `max_ready` more that did not end.

        Of 1, a cheap request may be prepared beside a dear one all the same.
        """
        self._max_preparing = max_preparing
        self._max_dear = max(max_preparing - 1, 1)
        self._max_media = max(max_preparing, self._max_dear + 1)
        self._max_ready = max_ready
        self._cheap: set[str] = set()
        self._dear: set[str] = set()
        self._videos: set[str] = set()
        self._texts: set[str] = set()
        self._cancellations: dict[str, Cancellation] = {}
        self._is_turn_of_oldest = True

    @property
    def request_ids(self) -> frozenset[str]:
        """Of the requests that a thread has."""
        return frozenset(self._cancellations)

    def next(self, requests: Iterable[Request]) -> list[Request]:
        """Those that a thread should take now: `start` each. `requests`: all, by their turns."""
        tracked = list(requests)
        waiting = [r for r in tracked if r.state is State.WAITING]
        texts = [r for r in waiting if not r.has_media]
        begun = sum(r.has_media and r.state is not State.WAITING for r in tracked)
        free = self._max_preparing - len(self._texts)
        return [
            *self._next_with_media([r for r in waiting if r.has_media], begun),
            *texts[: max(free, 0)],
        ]

    def start(self, request: Request) -> Cancellation:
        """A thread takes `request`; what tells it to stop."""
        kind = self._texts
        if request.has_media:
            kind = self._dear if _is_dear(request) else self._cheap
        kind.add(request.request_id)
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
        for kind in (self._cheap, self._dear, self._videos, self._texts):
            kind.discard(request_id)

    def _next_with_media(self, waiting: list[Request], num_begun: int) -> list[Request]:
        num_cheap, num_dear = len(self._cheap), len(self._dear)
        room = self._max_preparing + self._max_ready - num_begun
        has_video, taken = bool(self._videos), list[Request]()
        while len(taken) < room and num_cheap + num_dear < self._max_media:
            may_dear, may_cheap = num_dear < self._max_dear, num_cheap < self._max_preparing
            able = [
                request
                for request in waiting
                if (may_dear if _is_dear(request) else may_cheap)
                and not (has_video and request.has_video)
            ]
            if not able:
                break
            request = able[0] if self._is_turn_of_oldest else min(able, key=_num_pixels)
            self._is_turn_of_oldest = not self._is_turn_of_oldest
            waiting.remove(request)
            taken.append(request)
            num_dear += _is_dear(request)
            num_cheap += not _is_dear(request)
            has_video = has_video or request.has_video
        return taken


def _is_dear(request: Request) -> bool:
    return request.has_video or request.num_pixels > DEAR_PIXELS


def _num_pixels(request: Request) -> int:
    return request.num_pixels
