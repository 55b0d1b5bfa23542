"""Which requests a preparer thread takes next, and which ones have one."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from vlm_server.child.cancellation import Cancellation
from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State

_MOST_READY = 16
"""Requests that are prepared and do not decode yet: their pixels take the machine's memory."""
DEAR_PIXELS = 16_000_000
"""A request with more to decode may take seconds; two 4K screenshots are just below."""


class _Kind(enum.Enum):
    """What takes a place of its own. A request with media takes several; its schema takes none."""

    TEXT = "neither media nor a schema"
    MEDIA = "media, whatever they cost"
    CHEAP = "images with few pixels"
    DEAR = "images with many pixels, or a video"
    VIDEO = "a video"
    SCHEMA = "a schema, and no media"


class PreparerQueue:
    """Limits how many requests are prepared at once. Changes no request.

    With media or a schema, never more than can wait: pixels and grammars take memory. Texts take
    little, and pass them. Dear requests never take all threads, and of videos one is prepared at a
    time. With media the oldest and the one with the fewest pixels take turns, so that nobody waits
    for ever. A request that was aborted keeps its thread until that is done.
    """

    def __init__(self, max_preparing: int, max_ready: int) -> None:
        """`max_preparing` of each kind at once; `max_ready` more may wait or decode, but for texts.

        Of those that do not decode yet, no more than `_MOST_READY`.

        Of 1, a cheap request may be prepared beside a dear one all the same.
        """
        max_dear = max(max_preparing - 1, 1)
        self._most = dict.fromkeys(_Kind, max_preparing) | {
            _Kind.MEDIA: max(max_preparing, max_dear + 1),
            _Kind.DEAR: max_dear,
            _Kind.VIDEO: 1,
        }
        self._most_begun = max_preparing + max_ready
        self._most_undecoded = max_preparing + min(max_ready, _MOST_READY)
        self._preparing: dict[str, frozenset[_Kind]] = {}
        self._cancellations: dict[str, Cancellation] = {}
        self._is_turn_of_oldest = True

    @property
    def request_ids(self) -> frozenset[str]:
        """Of the requests that a thread has."""
        return frozenset(self._cancellations)

    def next(self, requests: Iterable[Request]) -> list[Request]:
        """Those that a thread should take now: `start` each. `requests`: all, by their turns."""
        tracked = list(requests)
        waiting = [request for request in tracked if request.state is State.WAITING]
        if not waiting:
            return []
        rooms = self._rooms([r for r in tracked if r.state is not State.WAITING])
        taken = list[Request]()
        while able := _able(waiting, rooms):
            request = self._choose(able)
            waiting.remove(request)
            taken.append(request)
            for kind in _kinds(request):
                rooms[kind] -= 1
        return taken

    def start(self, request: Request) -> Cancellation:
        """A thread takes `request`; what tells it to stop."""
        self._preparing[request.request_id] = _kinds(request)
        cancellation = self._cancellations[request.request_id] = Cancellation()
        return cancellation

    def cancel(self, request_id: str) -> None:
        """Nobody waits for it any more. One that no thread has is no error."""
        if cancellation := self._cancellations.get(request_id):
            cancellation.cancel()

    def end(self, request_id: str) -> None:
        """The thread is done with a request."""
        del self._cancellations[request_id], self._preparing[request_id]

    def _rooms(self, begun: list[Request]) -> dict[_Kind, int]:
        """How many more of each kind may be prepared; `begun` are those that were, or are."""
        preparing = list(self._preparing.values())
        rooms = {kind: most - _count(kind, preparing) for kind, most in self._most.items()}
        undecoded = [request for request in begun if request.state is not State.DECODE]
        bounds = ((begun, self._most_begun), (undecoded, self._most_undecoded))
        for requests, most in bounds:
            kinds = [_kinds(request) for request in requests]
            for kind in (_Kind.MEDIA, _Kind.SCHEMA):
                rooms[kind] = min(rooms[kind], most - _count(kind, kinds))
        return rooms

    def _choose(self, able: list[Request]) -> Request:
        oldest = able[0]
        if not oldest.has_media:
            return oldest
        self._is_turn_of_oldest = not self._is_turn_of_oldest
        if not self._is_turn_of_oldest:
            return oldest
        return min((request for request in able if request.has_media), key=_cost)


def _able(waiting: list[Request], rooms: dict[_Kind, int]) -> list[Request]:
    """Those that there is room for, in order."""
    return [one for one in waiting if all(rooms[kind] > 0 for kind in _kinds(one))]


def _cost(request: Request) -> tuple[bool, int]:
    return request.has_video, request.num_pixels


def _count(kind: _Kind, each: list[frozenset[_Kind]]) -> int:
    return sum(kind in kinds for kinds in each)


def _kinds(request: Request) -> frozenset[_Kind]:
    is_dear = request.has_video or request.num_pixels > DEAR_PIXELS
    found = {
        _Kind.MEDIA: request.has_media,
        _Kind.DEAR: request.has_media and is_dear,
        _Kind.CHEAP: request.has_media and not is_dear,
        _Kind.VIDEO: request.has_video,
        _Kind.SCHEMA: request.has_schema and not request.has_media,
    }
    return frozenset(kind for kind, has_it in found.items() if has_it) or frozenset({_Kind.TEXT})
