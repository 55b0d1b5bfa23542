"""Which requests a preparer thread takes next, and which ones have one."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable

from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State
from vlm_server.engine.scheduler.client_turns import ClientTurns
from vlm_server.platform.child.cancellation import Cancellation

_MOST_READY = 16
"""Requests that are prepared and do not decode yet: their pixels take the machine's memory."""
COSTLY_PIXELS = 16_000_000
"""A request with more to decode may take seconds; two 4K screenshots are just below."""


class _Kind(enum.Enum):
    """What is limited by itself. A request with media is of several kinds; its schema adds none."""

    TEXT = "neither media nor a schema"
    MEDIA = "media, whatever they cost"
    CHEAP = "images with few pixels"
    COSTLY = "images with many pixels, or a video"
    VIDEO = "a video"
    SCHEMA = "a schema, and no media"


class PreparerQueue:
    """Limits how many requests are prepared at once. Changes no request.

    Requests with media or a schema are prepared only as far ahead as they can be used soon, since
    pixels and grammars take memory; texts take little, and may overtake them. Costly requests never
    take all threads, and only one video is prepared at a time. Clients take turns (`ClientTurns`).
    Among a client's requests with media or a schema, the oldest and the one with the fewest pixels,
    or the shortest schema, are chosen alternately, so that none waits for ever. An aborted request
    keeps its thread until that is done.
    """

    def __init__(self, max_preparing: int, max_ready: int, clock: Callable[[], float]) -> None:
        """max_preparing: how many of each kind are prepared at once; with 1, a cheap one may still
        be prepared beside a costly one. max_ready: how many more with media or a schema may be
        waiting or decoding; of those that do not decode yet, at most `_MOST_READY`.
        """
        max_costly = max(max_preparing - 1, 1)
        self._most = dict.fromkeys(_Kind, max_preparing) | {
            _Kind.MEDIA: max(max_preparing, max_costly + 1),
            _Kind.COSTLY: max_costly,
            _Kind.VIDEO: 1,
        }
        self._most_begun = max_preparing + max_ready
        self._most_undecoded = max_preparing + min(max_ready, _MOST_READY)
        self._preparing: dict[str, frozenset[_Kind]] = {}
        self._cancellations: dict[str, Cancellation] = {}
        self._clients: dict[str, str] = {}
        self._turns = ClientTurns(clock)

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
        self._turns.wait([request.client for request in waiting])
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
        self._clients[request.request_id] = request.client
        self._turns.begin(request.request_id, request.client)
        cancellation = self._cancellations[request.request_id] = Cancellation()
        return cancellation

    def cancel(self, request_id: str) -> None:
        """Nobody waits for it any more. One that no thread has is no error."""
        if cancellation := self._cancellations.get(request_id):
            cancellation.cancel()

    def end(self, request_id: str) -> None:
        """The thread is done with a request."""
        del self._cancellations[request_id], self._preparing[request_id]
        self._turns.end(request_id, self._clients.pop(request_id))

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
        client = self._turns.next([request.client for request in able])
        own = [request for request in able if request.client == client]
        oldest = own[0]
        kind = next((k for k in (_Kind.MEDIA, _Kind.SCHEMA) if k in _kinds(oldest)), None)
        if kind is None or not self._turns.takes_cheapest(client):
            return oldest
        return min((request for request in own if kind in _kinds(request)), key=_cost)


def _able(waiting: list[Request], rooms: dict[_Kind, int]) -> list[Request]:
    """Those that there is room for, in order."""
    return [one for one in waiting if all(rooms[kind] > 0 for kind in _kinds(one))]


def _cost(request: Request) -> tuple[bool, int, int]:
    return request.has_video, request.num_pixels, request.num_schema_chars


def _count(kind: _Kind, each: list[frozenset[_Kind]]) -> int:
    return sum(kind in kinds for kinds in each)


def _kinds(request: Request) -> frozenset[_Kind]:
    is_costly = request.has_video or request.num_pixels > COSTLY_PIXELS
    found = {
        _Kind.MEDIA: request.has_media,
        _Kind.COSTLY: request.has_media and is_costly,
        _Kind.CHEAP: request.has_media and not is_costly,
        _Kind.VIDEO: request.has_video,
        _Kind.SCHEMA: request.has_schema and not request.has_media,
    }
    return frozenset(kind for kind, has_it in found.items() if has_it) or frozenset({_Kind.TEXT})
