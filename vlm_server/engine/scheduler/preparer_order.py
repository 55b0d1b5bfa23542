"""The order in which preparer threads take requests, and how many at once."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State

_MOST_READY = 16
"""Requests that are prepared and do not decode yet: their pixels take the machine's memory."""
COSTLY_PIXELS = 16_000_000
"""A request with more to decode may take seconds; two 4K screenshots are just below."""


class _Kind(enum.Enum):
    """A kind of request with a limit of its own.

    A request with media is of several kinds; its schema adds none.
    """

    TEXT = "neither media nor a schema"
    MEDIA = "media, whatever they cost"
    CHEAP = "images with few pixels"
    COSTLY = "images with many pixels, or a video"
    VIDEO = "a video"
    SCHEMA = "a schema, and no media"


@dataclass(frozen=True, slots=True)
class _Started:
    """A preparation that a thread has, since when, and what it counts as."""

    client: str
    kinds: frozenset[_Kind]
    since: float


@dataclass(slots=True)
class _Share:
    """A client's share of the threads: the seconds of its preparations that are done."""

    seconds: float
    is_turn_of_cheapest: bool = False


class PreparerOrder:
    """Limits how many requests are prepared at once, and chooses them. Changes no request.

    Requests with media or a schema are prepared only as far ahead as they can be used soon, since
    pixels and grammars take memory; texts take little, and may overtake them. Costly requests never
    take all threads, and only one video is prepared at a time. An aborted request keeps its thread
    until that is done.

    The next client is the one that has had the threads for the shortest time, since nobody knows
    how long a preparation will take. So a client whose schemas take seconds waits for one whose
    schemas do not, which waits for the preparations under way at most. A client that had nothing
    comes in with whoever was last. Among a client's requests with media or a schema, the oldest and
    the cheapest are chosen alternately, so that none waits for ever.
    """

    def __init__(self, max_preparing: int, max_ready: int, clock: Callable[[], float]) -> None:
        """max_preparing: how many of each kind are prepared at once; with 1, a cheap one may still
        be prepared beside a costly one. max_ready: how many more with media or a schema may be
        waiting or decoding; of those that do not decode yet, at most `_MOST_READY`. clock: in
        seconds, never backwards.
        """
        max_costly = max(max_preparing - 1, 1)
        self._most = dict.fromkeys(_Kind, max_preparing) | {
            _Kind.MEDIA: max(max_preparing, max_costly + 1),
            _Kind.COSTLY: max_costly,
            _Kind.VIDEO: 1,
        }
        self._most_begun = max_preparing + max_ready
        self._most_undecoded = max_preparing + min(max_ready, _MOST_READY)
        self._clock = clock
        self._started: dict[str, _Started] = {}
        """By request id."""
        self._shares: dict[str, _Share] = {}
        """By client: of those that wait or have a thread."""
        self._virtual_time = 0.0
        """The seconds that the last client had had when its turn came; never falls."""

    @property
    def request_ids(self) -> frozenset[str]:
        """Of the requests that a thread has."""
        return frozenset(self._started)

    def next(self, requests: Iterable[Request]) -> list[Request]:
        """Requests that a thread should take now: `start` each. `requests`: all, in their order."""
        tracked = list(requests)
        waiting = [request for request in tracked if request.state is State.WAITING]
        if not waiting:
            return []
        clients = {request.client for request in waiting}
        clients |= {one.client for one in self._started.values()}
        self._shares = {
            client: self._shares.get(client) or _Share(self._virtual_time) for client in clients
        }
        rooms = self._rooms([r for r in tracked if r.state is not State.WAITING])
        taken = list[Request]()
        while able := _able(waiting, rooms):
            request = self._choose(able)
            waiting.remove(request)
            taken.append(request)
            for kind in _kinds(request):
                rooms[kind] -= 1
        return taken

    def start(self, request: Request) -> None:
        """A thread takes `request`."""
        client = request.client
        self._virtual_time = max(self._virtual_time, self._seconds(client))
        self._started[request.request_id] = _Started(client, _kinds(request), self._clock())

    def finish(self, request_id: str) -> None:
        """The thread is done with a request."""
        done = self._started.pop(request_id)
        self._shares[done.client].seconds += self._clock() - done.since

    def _seconds(self, client: str) -> float:
        """Seconds for which a client has had threads, until now."""
        now = self._clock()
        under_way = [now - one.since for one in self._started.values() if one.client == client]
        return self._shares[client].seconds + sum(under_way)

    def _rooms(self, begun: list[Request]) -> dict[_Kind, int]:
        """How many more of each kind may be prepared; `begun` are those that were, or are."""
        preparing = [one.kinds for one in self._started.values()]
        rooms = {kind: most - _count(kind, preparing) for kind, most in self._most.items()}
        undecoded = [request for request in begun if request.state is not State.DECODE]
        bounds = ((begun, self._most_begun), (undecoded, self._most_undecoded))
        for requests, most in bounds:
            kinds = [_kinds(request) for request in requests]
            for kind in (_Kind.MEDIA, _Kind.SCHEMA):
                rooms[kind] = min(rooms[kind], most - _count(kind, kinds))
        return rooms

    def _choose(self, able: list[Request]) -> Request:
        client = min((request.client for request in able), key=self._seconds)
        own = [request for request in able if request.client == client]
        oldest, share = own[0], self._shares[client]
        kind = next((k for k in (_Kind.MEDIA, _Kind.SCHEMA) if k in _kinds(oldest)), None)
        if kind is None:
            return oldest
        is_turn_of_cheapest = share.is_turn_of_cheapest
        share.is_turn_of_cheapest = not is_turn_of_cheapest
        alike = [request for request in own if kind in _kinds(request)]
        return min(alike, key=_cost) if is_turn_of_cheapest else oldest


def _able(waiting: list[Request], rooms: dict[_Kind, int]) -> list[Request]:
    """Waiting requests that there is room for, in order."""
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
