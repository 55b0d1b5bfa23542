"""Whose media the encoder takes next, and whose chunk the runner: they share one device.

Only one prompt with media is worked on at a time: a device that does two at once finishes both
late. Only beside the last chunk of one may the next one's media be encoded.

What would be encoded one after the other anyway, with no prompt's turn between, may be encoded in
one call: nobody's prefill comes later for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State
from vlm_server.engine.scheduler.fair_queue import FairQueue, Waiting
from vlm_server.interfaces import EncodeWork


class EncoderPrefillArbiter:
    """One `FairQueue` for the encoder, one for the prefill."""

    def __init__(self, requests: Mapping[str, Request], max_num_seqs: int) -> None:
        """`requests` are those that are tracked, in their order. Only reads them."""
        self._requests = requests
        self._max_num_seqs = max_num_seqs
        self._prefill_queue = FairQueue()
        self._media_queue = FairQueue()
        self._encoding: tuple[EncodeWork, ...] = ()

    @property
    def encoding(self) -> tuple[EncodeWork, ...]:
        """What the encoder works on; requests of it may have ended."""
        return self._encoding

    @property
    def texts_wait(self) -> bool:
        """Whether there is a prompt without media to prefill: its chunks take longer beside an
        encode."""
        return any(
            r.state is State.PREFILL and not r.has_uncached_media for r in self._requests.values()
        )

    def next_to_encode(self, beside: Request | None) -> Request | None:
        """Whose media are next; None if it is a prompt's turn, or nobody's.

        The last chunk of `beside` is prefilled meanwhile.
        """
        encoding = [r for r in self._requests.values() if r.state is State.ENCODING]
        if self._encoding or not encoding:
            return None
        has_room = self.next_to_prefill() is not None
        waiting = [
            _device_work_left(r)
            for r in self._requests.values()
            if r is not beside and (r.state is State.ENCODING or (has_room and _has_media_chunk(r)))
        ]
        request_id = self._media_queue.next(waiting)
        return next((r for r in encoding if r.request_id == request_id), None)

    def encodes_after(self, request: Request) -> Iterator[Request]:
        """Whose media would be next, time and again, once one of `request` were encoded.

        If nobody came; until it is a prompt's turn. One that waits for room in the decode batch may
        get it at any time.
        """
        queue, num_encoded = self._media_queue.copy(), Counter[str]()
        waiting = [
            r for r in self._requests.values() if r.state is State.ENCODING or _has_media_chunk(r)
        ]
        turn = request
        while True:
            queue.took(turn.request_id)
            num_encoded[turn.request_id] += 1
            left = [_device_work_left(r, num_encoded[r.request_id]) for r in waiting]
            request_id = queue.next(left)
            turn = next(r for r in waiting if r.request_id == request_id)
            if len(turn.spans_to_encode) <= num_encoded[turn.request_id]:
                return
            yield turn

    def next_to_prefill(self) -> Request | None:
        """Whose chunk the next step takes: of no prompt with media beside an encode.

        The decode batch has room for the sequences of every request whose prefill has begun.
        """
        return self._prefill_turn(self._prefill_queue, ())

    def prefills_after(self, request: Request) -> Iterator[Request]:
        """Whose chunk would be next, time and again, if each were its prompt's last.

        If nobody came, and the chunk of `request` were first.
        """
        queue, done, turn = self._prefill_queue.copy(), list[Request](), request
        while True:
            queue.took(turn.request_id)
            done.append(turn)
            after = self._prefill_turn(queue, done)
            if after is None:
                return
            turn = after
            yield turn

    def _prefill_turn(self, queue: FairQueue, done: Collection[Request]) -> Request | None:
        """Whose turn it is by `queue`, if the prompts of those `done` were prefilled."""
        waiting = [
            _prefill_left(r)
            for r in self._requests.values()
            if r.state is State.PREFILL
            and r not in done
            and not (r.has_uncached_media and self._encoding)
        ]
        taken = sum(
            len(r.seqs) for r in self._requests.values() if r.is_known_to_runner or r in done
        )
        free = self._max_num_seqs - taken
        room = free + sum(one.num_seqs for one in waiting if one.is_begun)
        request_id = queue.next(waiting, room)
        return None if request_id is None else self._requests[request_id]

    def start_encode(self, works: Sequence[EncodeWork]) -> None:
        """The encoder has `works` from now on."""
        for work in works:
            self._media_queue.took(work.request_id)
        self._encoding = tuple(works)

    def end_encode(self) -> None:
        """The encoder is done with what it had."""
        assert self._encoding
        self._encoding = ()

    def start_chunk(self, request: Request) -> None:
        """The next step has a chunk of `request`."""
        self._prefill_queue.took(request.request_id)
        if request.has_uncached_media:
            self._media_queue.took(request.request_id)


def _has_media_chunk(request: Request) -> bool:
    return request.state is State.PREFILL and request.has_uncached_media


def _device_work_left(request: Request, num_encoded: int = 0) -> Waiting:
    """What it wants of the device before it decodes: tokens to encode and to prefill.

    If so many more of its media were encoded.
    """
    left = request.num_prefill_tokens_left + sum(request.spans_to_encode[num_encoded:])
    return Waiting(request.request_id, left, request.is_begun or num_encoded > 0)


def _prefill_left(request: Request) -> Waiting:
    """What it wants of the prefill, which all its sequences come from."""
    return Waiting(
        request.request_id,
        request.num_prefill_tokens_left,
        request.is_known_to_runner,
        num_seqs=len(request.choices),
    )
