"""All live requests, in the order in which they are served.

Start-time fair queueing (Goyal, Vin and Cheng, 1996), with the number of sequences as the cost.
"""

from __future__ import annotations

from collections.abc import Iterator

from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State


class LiveRequests(dict[str, Request]):
    """Requests by id, in the order of their virtual starts; a client's in the order of arrival.

    A request's virtual start is that of its client's previous request plus that one's number of
    sequences. A client with nothing queued starts at the current virtual time, so a heavy client
    cannot delay a light one. With a single client the order is that of arrival.
    """

    def __init__(self) -> None:
        super().__init__()
        self._virtual_time = 0
        """The virtual start of the next request to be served."""
        self._next_starts: dict[str, int] = {}
        """Virtual starts of clients' next requests, if later than the virtual time."""

    def enqueue(self, request: Request) -> None:
        """Insert `request` before those with a later virtual start."""
        request.virtual_start = self._virtual_start(request)
        later = [r for r in self.values() if r.virtual_start > request.virtual_start]
        self[request.request_id] = request
        for follower in later:  # to the end, in their order
            self[follower.request_id] = self.pop(follower.request_id)

    def _virtual_start(self, request: Request) -> int:
        waiting = [r.virtual_start for r in self.values() if not r.has_left_queue]
        latest = max([self._virtual_time, *self._next_starts.values()])
        self._virtual_time = min(waiting, default=latest)
        self._next_starts = {
            client: start
            for client, start in self._next_starts.items()
            if start > self._virtual_time
        }
        start = self._next_starts.get(request.client, self._virtual_time)
        self._next_starts[request.client] = start + request.sampling.n
        return start

    def in_state(self, state: State) -> Iterator[Request]:
        return (request for request in self.values() if request.state is state)

    @property
    def admitted(self) -> list[Request]:
        """Requests that may hold device memory."""
        return [request for request in self.values() if request.state.is_admitted]
