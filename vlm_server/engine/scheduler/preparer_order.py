"""The order in which preparer threads take requests, and the limits on their number."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State

_MAX_READY = 16
"""Requests that are prepared and not decoding yet: their pixels take the machine's memory."""
_MAX_INPUTS = 256
"""Texts for vectors that the threads have before them. Threads get work between two steps only, so
that fewer would leave batches empty, and let a short request wait for several steps."""
COSTLY_PIXELS = 16_000_000
"""A request with more pixels may take seconds to decode; two 4K screenshots are just below."""


class _Kind(enum.Enum):
    """A kind of request with a limit of its own.

    A request with media is of several kinds, whether it has a schema or not.
    """

    TEXT = "neither media nor a schema"
    MEDIA = "media"
    CHEAP = "images with few pixels"
    COSTLY = "images with many pixels, or a video"
    VIDEO = "a video"
    SCHEMA = "a schema, and no media"
    INPUT = "a text for vectors or scores"


@dataclass(frozen=True, slots=True)
class _Preparation:
    """A preparation under way: its request's client and kinds, and the time of its start."""

    client: str
    kinds: frozenset[_Kind]
    since: float


@dataclass(slots=True)
class _Share:
    """A client's use of the threads: the seconds of its finished preparations."""

    seconds: float
    is_turn_of_cheapest: bool = False


class PreparerOrder:
    """Limits how many requests are prepared concurrently, and chooses them. Changes no request.

    Requests with media or a schema are prepared only shortly before they are needed, since pixels
    and grammars take memory; texts take little, and may overtake them. Costly requests never take
    all threads, and only one video is prepared at a time. An aborted request counts until its
    thread is done with it.

    The next client is the one whose preparations have used the least thread time. A client that was
    idle starts at the time of the last client served. Of a client's requests with media or schemas,
    the oldest and the cheapest are chosen alternately.
    """

    def __init__(self, max_preparing: int, max_ready: int, clock: Callable[[], float]) -> None:
        """`clock`: in seconds, never backwards.

        max_preparing: the limit of each kind; with 1, a cheap request may still be prepared
        concurrently with a costly one. max_ready: how many more with media or a schema may be
        waiting or decoding; of those that do not decode yet, at most `_MAX_READY`.
        """
        max_costly = max(max_preparing - 1, 1)
        self._limits = dict.fromkeys(_Kind, max_preparing) | {
            _Kind.MEDIA: max(max_preparing, max_costly + 1),
            _Kind.COSTLY: max_costly,
            _Kind.VIDEO: 1,
            _Kind.INPUT: _MAX_INPUTS,
        }
        self._max_begun = max_preparing + max_ready
        self._max_undecoded = max_preparing + min(max_ready, _MAX_READY)
        self._clock = clock
        self._preparations: dict[str, _Preparation] = {}
        """The preparations under way, by request id."""
        self._shares: dict[str, _Share] = {}
        """The shares of clients with a waiting request or a preparation under way."""
        self._virtual_time = 0.0
        """The seconds that the client served last had used by then; never decreases."""

    @property
    def request_ids(self) -> frozenset[str]:
        """The ids of requests whose preparation is under way."""
        return frozenset(self._preparations)

    def next_to_prepare(self, requests: Iterable[Request]) -> list[Request]:
        """The requests to `start` now. `requests`: all live ones, in their order."""
        tracked = list(requests)
        waiting = [request for request in tracked if request.state is State.WAITING]
        if not waiting:
            return []
        clients = {request.client for request in waiting}
        clients |= {preparation.client for preparation in self._preparations.values()}
        self._shares = {
            client: self._shares.get(client) or _Share(self._virtual_time) for client in clients
        }
        rooms = self._rooms([r for r in tracked if r.state is not State.WAITING])
        chosen = list[Request]()
        while candidates := _fitting(waiting, rooms):
            request = self._choose(candidates)
            waiting.remove(request)
            chosen.append(request)
            for kind in _kinds(request):
                rooms[kind] -= 1
        return chosen

    def start(self, request: Request) -> None:
        """Record that a thread begins to prepare `request`."""
        client = request.client
        self._virtual_time = max(self._virtual_time, self._seconds(client))
        self._preparations[request.request_id] = _Preparation(
            client, _kinds(request), self._clock()
        )

    def finish(self, request_id: str) -> None:
        """Record that a thread is done with a request."""
        preparation = self._preparations.pop(request_id)
        self._shares[preparation.client].seconds += self._clock() - preparation.since

    def _seconds(self, client: str) -> float:
        """The thread time that a client has used until now, in seconds."""
        preparations = [
            preparation
            for preparation in self._preparations.values()
            if preparation.client == client
        ]
        return self._shares[client].seconds + sum(
            self._clock() - preparation.since for preparation in preparations
        )

    def _rooms(self, begun_requests: list[Request]) -> dict[_Kind, int]:
        """How many more of each kind may be prepared; `begun_requests`: all but waiting."""
        preparing = [preparation.kinds for preparation in self._preparations.values()]
        rooms = {kind: limit - _count(kind, preparing) for kind, limit in self._limits.items()}
        undecoded = [request for request in begun_requests if request.state is not State.DECODE]
        bounds = ((begun_requests, self._max_begun), (undecoded, self._max_undecoded))
        for requests, bound in bounds:
            kinds = [_kinds(request) for request in requests]
            for kind in (_Kind.MEDIA, _Kind.SCHEMA):
                rooms[kind] = min(rooms[kind], bound - _count(kind, kinds))
        return rooms

    def _choose(self, candidates: list[Request]) -> Request:
        clients = dict.fromkeys(request.client for request in candidates)
        client = min(clients, key=self._seconds)
        client_requests = [request for request in candidates if request.client == client]
        oldest, share = client_requests[0], self._shares[client]
        kind = next((k for k in (_Kind.MEDIA, _Kind.SCHEMA) if k in _kinds(oldest)), None)
        if kind is None:
            return oldest
        is_turn_of_cheapest = share.is_turn_of_cheapest
        share.is_turn_of_cheapest = not is_turn_of_cheapest
        alike = [request for request in client_requests if kind in _kinds(request)]
        return min(alike, key=_cost) if is_turn_of_cheapest else oldest


def _fitting(waiting: list[Request], rooms: dict[_Kind, int]) -> list[Request]:
    """The waiting requests that fit within the limits, in order."""
    return [r for r in waiting if all(rooms[kind] > 0 for kind in _kinds(r))]


def _cost(request: Request) -> tuple[bool, int, int]:
    return request.has_video, request.num_pixels, request.num_schema_chars


def _count(kind: _Kind, kinds_of_requests: list[frozenset[_Kind]]) -> int:
    return sum(kind in kinds for kinds in kinds_of_requests)


def _kinds(request: Request) -> frozenset[_Kind]:
    if not request.has_media:
        if request.pooling is not None:
            return _INPUT
        return _SCHEMA if request.has_schema else _TEXT
    if request.has_video:
        return _WITH_VIDEO
    return _COSTLY if request.num_pixels > COSTLY_PIXELS else _CHEAP


_TEXT, _INPUT = frozenset({_Kind.TEXT}), frozenset({_Kind.INPUT})
_SCHEMA = frozenset({_Kind.SCHEMA})
_CHEAP = frozenset({_Kind.MEDIA, _Kind.CHEAP})
_COSTLY = frozenset({_Kind.MEDIA, _Kind.COSTLY})
_WITH_VIDEO = _COSTLY | {_Kind.VIDEO}
