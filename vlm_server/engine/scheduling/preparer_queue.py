"""Which requests a preparer thread takes next, and which ones have one."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from vlm_server.child.cancellation import Cancellation
from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State


class _Kind(enum.Enum):
    """What takes a place of its own: a request with media and a schema takes one of both."""

    TEXT = "neither media nor a schema"
    MEDIA = "media"
    VIDEO = "a video"
    SCHEMA = "a schema"


class PreparerQueue:
    """Limits how many requests are prepared at once. Changes no request.

    With media or a schema, never more than can wait: pixels and grammars take memory. Texts take
    little, and pass them; of videos, which may take long, one is prepared at a time. A request that
    was aborted keeps its thread until that is done.
    """

    def __init__(self, max_preparing: int, max_ready: int) -> None:
        """`max_preparing` of each kind at once; `max_ready` more may wait, but for texts."""
        self._max_preparing = max_preparing
        self._max_ready = max_ready
        self._preparing: dict[str, frozenset[_Kind]] = {}
        self._cancellations: dict[str, Cancellation] = {}

    @property
    def request_ids(self) -> frozenset[str]:
        """Of the requests that a thread has."""
        return frozenset(self._cancellations)

    def next(self, requests: Iterable[Request]) -> list[Request]:
        """Those that a thread should take now, oldest first; `requests` are all there are."""
        tracked = list(requests)
        begun = [_kinds(request) for request in tracked if request.state is not State.WAITING]
        rooms = {kind: self._room(kind, begun) for kind in _Kind}
        taken = []
        for request in tracked:
            kinds = _kinds(request)
            if request.state is State.WAITING and all(rooms[kind] > 0 for kind in kinds):
                taken.append(request)
                for kind in kinds:
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

    def _room(self, kind: _Kind, begun: list[frozenset[_Kind]]) -> int:
        """How many more of `kind` may be prepared; `begun` has the kinds of each that was."""
        num_preparing = sum(kind in kinds for kinds in self._preparing.values())
        match kind:
            case _Kind.TEXT:
                return self._max_preparing - num_preparing
            case _Kind.VIDEO:
                return 1 - num_preparing
            case _:
                num_begun = sum(kind in kinds for kinds in begun)
                ready = self._max_preparing + self._max_ready - num_begun
                return min(self._max_preparing - num_preparing, ready)


def _kinds(request: Request) -> frozenset[_Kind]:
    found = {
        _Kind.MEDIA: request.has_media,
        _Kind.VIDEO: request.has_video,
        _Kind.SCHEMA: request.has_schema,
    }
    return frozenset(kind for kind, has_it in found.items() if has_it) or frozenset({_Kind.TEXT})
