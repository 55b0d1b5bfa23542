"""Whose picture the encoder takes, and whose chunk the runner. Knows requests; runs nothing.

Of prompts with media one at a time is worked on: a device that does two at once is late with both.
Only behind the last chunk of one the next one's picture may be encoded.
"""

from __future__ import annotations

from collections.abc import Mapping

from vlm_server.engine.request.request import Request
from vlm_server.engine.scheduling.fair_queue import FairQueue


class EncoderPrefillArbiter:
    """First come, first served, as `FairQueue` has it: for the encoder, and for the prefill.

    `requests` are those that are tracked, the oldest first.
    """

    def __init__(self, requests: Mapping[str, Request], max_num_seqs: int) -> None:
        self._requests = requests
        self._max_num_seqs = max_num_seqs
        self._prefill_turns = FairQueue()
        self._media_turns = FairQueue()
        self._with_encoder: dict[str, str] = {}
        """The keys of the pictures, by request."""

    @property
    def with_encoder(self) -> frozenset[str]:
        """Whose picture is being encoded; the request may have ended."""
        return frozenset(self._with_encoder)

    def next_to_encode(self, beside: Request | None) -> Request | None:
        """Whose picture is next; None if it is a prompt's turn, or nobody's.

        `beside` is having its last chunk prefilled.
        """
        if self._with_encoder or not any(r.needs_encoding for r in self._requests.values()):
            return None
        has_room = self.next_to_prefill() is not None
        waiting = [
            r.work_left
            for r in self._requests.values()
            if r is not beside
            and (r.needs_encoding or (r.has_media_left and r.can_prefill and has_room))
        ]
        request_id = self._media_turns.next(waiting)
        request = None if request_id is None else self._requests[request_id]
        return request if request and request.needs_encoding else None

    def next_to_prefill(self) -> Request | None:
        """Whose chunk the next step takes: of no prompt with media beside an encode.

        Who is begun holds a KV cache while it waits for its rows, and gets them.
        """
        waiting = [
            r.tokens_left
            for r in self._requests.values()
            if r.can_prefill and not (r.has_media_left and self._with_encoder)
        ]
        taken = sum(len(r.rows) for r in self._requests.values() if r.is_known_to_runner)
        free = self._max_num_seqs - taken
        room = free + sum(one.num_rows for one in waiting if one.is_begun)
        request_id = self._prefill_turns.next(waiting, room)
        return None if request_id is None else self._requests[request_id]

    def give_encoder(self, request: Request, mm_hash: str) -> None:
        """The request's picture with this key is being encoded from now on."""
        self._media_turns.took(request.request_id)
        self._with_encoder[request.request_id] = mm_hash

    def take_back_encoder(self, request_id: str) -> str:
        """The encoder is done; the key of what it had."""
        return self._with_encoder.pop(request_id)

    def give_chunk(self, request: Request) -> None:
        """The request's next chunk is in the next step."""
        self._prefill_turns.took(request.request_id)
        if request.has_media_left:
            self._media_turns.took(request.request_id)
