"""All live requests, in the order in which they are served."""

from __future__ import annotations

from collections.abc import Iterator

from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State
from vlm_server.engine.scheduler.client_queue import ClientQueue


class Requests(dict[str, Request]):
    """By id, in the order of their start tags; a client's in the order in which they came."""

    def __init__(self) -> None:
        super().__init__()
        self._clients = ClientQueue()

    def line_up(self, request: Request) -> None:
        """Take `request` in, before those with a higher start tag."""
        request.start_tag = self._clients.start_tag(
            request.client, request.sampling.n, self.values()
        )
        later = [one for one in self.values() if one.start_tag > request.start_tag]
        self[request.request_id] = request
        for one in later:  # to the end, in their order
            self[one.request_id] = self.pop(one.request_id)

    def in_state(self, state: State) -> Iterator[Request]:
        return (request for request in self.values() if request.state is state)

    @property
    def admitted(self) -> list[Request]:
        """Those that may hold device memory."""
        return [request for request in self.values() if request.state.is_admitted]
