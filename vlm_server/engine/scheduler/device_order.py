"""The turns of requests at the encoder and at the prefill, which share one device.

Only one prompt with media is worked on at a time: a device that does two at once finishes both
late. Only during the last chunk of one may the next one's media be encoded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State
from vlm_server.interfaces import EncodeWork


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits for its next turn.

    left: its remaining work, in tokens. num_seqs: how many sequences it adds to the decode batch
    when none is left.
    """

    request_id: str
    left: int
    is_begun: bool
    num_seqs: int = 0


def fair_turn(waiting: Sequence[Waiting], last: str | None, room: int = 0) -> str | None:
    """The id of the request that has the next turn; None if no request can have one.

    The oldest request comes first; the shortest of the others gets every other turn beside it. At
    most two are begun at a time, and more only if one of them can't go on for a while. So a short
    request never waits for the end of a long one; a long one takes twice as long at most; and every
    request becomes the oldest eventually. A request begins only if the decode batch has room for
    all its sequences, and none takes the room that the oldest waits for.

    waiting: the oldest first. last: the request that had the last turn. room: how many sequences
    the decode batch can still take, with those of begun requests.
    """
    begun = [one for one in waiting if one.is_begun]
    room -= sum(one.num_seqs for one in begun)
    oldest = waiting[0] if waiting else None
    if oldest is None or (not oldest.is_begun and oldest.num_seqs > room):
        return begun[0].request_id if begun else None
    if oldest.request_id != last:
        return oldest.request_id
    room -= 0 if oldest.is_begun else oldest.num_seqs
    others = [one for one in begun if one is not oldest] or [
        one for one in waiting if one.left < oldest.left and one.num_seqs <= room
    ]
    return min(others, key=lambda one: one.left, default=oldest).request_id


class DeviceOrder:
    """The turns of the encoder, and those of the prefill; each by `fair_turn`.

    A turn is taken by `start_encode` or `start_chunk`; until then the answers stay the same.
    """

    def __init__(self, requests: Mapping[str, Request], max_num_seqs: int) -> None:
        """`requests` are those that are tracked, in their order. Only reads them."""
        self._requests = requests
        self._max_num_seqs = max_num_seqs
        self._last_prefill: str | None = None
        self._last_media: str | None = None
        """The last request with media that the device worked on."""
        self._encoding: tuple[EncodeWork, ...] = ()

    @property
    def encoding(self) -> tuple[EncodeWork, ...]:
        """The work of the encoder; its requests may have ended."""
        return self._encoding

    @property
    def texts_wait(self) -> bool:
        """Whether a prompt without media waits for its prefill, which an encode would slow down."""
        return any(
            r.state is State.PREFILL and not r.has_uncached_media for r in self._requests.values()
        )

    def next_to_encode(self, during: Request | None) -> Request | None:
        """The request whose media are next; None if it is a prompt's turn, or no request waits.

        The last chunk of `during`, if there is one, is prefilled meanwhile.
        """
        encoding = [r for r in self._requests.values() if r.state is State.ENCODING]
        if self._encoding or not encoding:
            return None
        has_room = self.next_to_prefill() is not None
        waiting = [
            _device_work_left(r)
            for r in self._requests.values()
            if r is not during and (r.state is State.ENCODING or (has_room and _has_media_chunk(r)))
        ]
        request_id = fair_turn(waiting, self._last_media)
        return next((r for r in encoding if r.request_id == request_id), None)

    def encodes_after(self, request: Request) -> Iterator[Request]:
        """The turns of the encoder after one of `request`, if no request comes.

        They end with a prompt's turn, even if that waits for room in the decode batch: there may be
        room at any time.
        """
        turn, num_encoded = request, Counter[str]()
        waiting = [
            r for r in self._requests.values() if r.state is State.ENCODING or _has_media_chunk(r)
        ]
        while True:
            num_encoded[turn.request_id] += 1
            left = [_device_work_left(r, num_encoded[r.request_id]) for r in waiting]
            request_id = fair_turn(left, turn.request_id)
            turn = next(r for r in waiting if r.request_id == request_id)
            if len(turn.spans_to_encode) <= num_encoded[turn.request_id]:
                return
            yield turn

    def next_to_prefill(self) -> Request | None:
        """The request whose chunk is next; none with media during an encode.

        The decode batch has room for the sequences of every request whose prefill has begun.
        """
        return self._prefill_turn(self._last_prefill, ())

    def prefills_after(self, request: Request) -> Iterator[Request]:
        """The turns of the prefill after one of `request`, if no request comes.

        Each chunk is taken for its prompt's last.
        """
        turn, done = request, list[Request]()
        while True:
            done.append(turn)
            after = self._prefill_turn(turn.request_id, done)
            if after is None:
                return
            turn = after
            yield turn

    def _prefill_turn(self, last: str | None, done: Collection[Request]) -> Request | None:
        """The next request to prefill after `last`, as if the prompts of `done` were prefilled."""
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
        request_id = fair_turn(waiting, last, room)
        return None if request_id is None else self._requests[request_id]

    def start_encode(self, works: Sequence[EncodeWork]) -> None:
        """The encoder has `works` from now on."""
        self._last_media = works[-1].request_id
        self._encoding = tuple(works)

    def finish_encode(self) -> None:
        """The encoder is done with what it had."""
        assert self._encoding
        self._encoding = ()

    def start_chunk(self, request: Request) -> None:
        """The next step has a chunk of `request`."""
        self._last_prefill = request.request_id
        if request.has_uncached_media:
            self._last_media = request.request_id


def _has_media_chunk(request: Request) -> bool:
    return request.state is State.PREFILL and request.has_uncached_media


def _device_work_left(request: Request, num_encoded: int = 0) -> Waiting:
    """The request as it waits for the device: with all tokens to encode and to prefill.

    As if `num_encoded` more of its media were encoded.
    """
    left = request.num_prefill_tokens_left + sum(request.spans_to_encode[num_encoded:])
    return Waiting(request.request_id, left, request.is_begun or num_encoded > 0)


def _prefill_left(request: Request) -> Waiting:
    """The request as it waits for the prefill, from which all its sequences come."""
    return Waiting(
        request.request_id,
        request.num_prefill_tokens_left,
        request.is_known_to_runner,
        num_seqs=len(request.choices),
    )
