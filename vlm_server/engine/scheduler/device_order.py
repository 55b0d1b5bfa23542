"""The turns of requests at the disk reader, the encoder and the prefill, which share one device.

The device works on one prompt with media at a time: two at a time would both finish late. Only
during a prompt's last chunk may the media of the next one be encoded. The parts of a long option
follow each other, since memory was reserved for one peak at a time: a copy of its prompt's KV lives
from the first part to the last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from vlm_server.engine.request.request import Request, group_id_of
from vlm_server.engine.request.states import State
from vlm_server.interfaces import EncodeWork, PrefillWork
from vlm_server.protocol import OnDevice


@dataclass(frozen=True, slots=True)
class TurnCandidate:
    """A request that could have the next turn."""

    request_id: str
    num_tokens_left: int
    """Its remaining work."""
    is_begun: bool
    num_seqs: int = 0
    """The number of sequences that it adds to the decode batch at the end."""


def fair_turn(candidates: Sequence[TurnCandidate], last: str | None, room: int = 0) -> str | None:
    """The id of the request that has the next turn; None if no request can have one.

    The oldest request alternates with the shortest of the others. At most two are begun at a time,
    and more only if one of them can't go on for a while. So a short request never waits for the end
    of a long one; a long one takes at most twice as long; and every request becomes the oldest
    eventually. A request begins only if the decode batch has room for all its sequences, and none
    takes the room that the oldest waits for; meanwhile those go on that need none.

    candidates: the oldest first. last: the request that had the last turn. room: the number of
    sequences that the decode batch can still take, including those of begun requests.
    """
    begun = [candidate for candidate in candidates if candidate.is_begun]
    room -= sum(candidate.num_seqs for candidate in begun)
    oldest = candidates[0] if candidates else None
    if oldest is None or (not oldest.is_begun and oldest.num_seqs > room):
        ready = begun or [candidate for candidate in candidates if not candidate.num_seqs]
        return ready[0].request_id if ready else None
    if oldest.request_id != last:
        return oldest.request_id
    room -= 0 if oldest.is_begun else oldest.num_seqs
    alternatives = [candidate for candidate in begun if candidate is not oldest] or [
        candidate
        for candidate in candidates
        if candidate.num_tokens_left < oldest.num_tokens_left and candidate.num_seqs <= room
    ]
    return min(
        alternatives, key=lambda candidate: candidate.num_tokens_left, default=oldest
    ).request_id


class DeviceOrder:
    """The turns of requests, and their disk read and encode under way.

    Disk reads come in the requests' order; the turns of the encoder, and those of the prefill, by
    `fair_turn`. Only methods `start_...` and `finish_...` change anything.
    """

    def __init__(self, requests: Mapping[str, Request], max_num_seqs: int) -> None:
        """`requests`: all live ones, in their order; only read here."""
        self._requests = requests
        self._max_num_seqs = max_num_seqs
        self._last_prefill: str | None = None
        self._last_media: str | None = None
        """The last request with media that the device worked on."""
        self._disk_reading: str | None = None
        """The request of the disk read under way; it may have ended."""
        self._encoding: tuple[str, ...] = ()
        """The requests of the encode under way; they may have ended."""
        self._encode_during: str | None = None
        """The request during whose chunk the encode under way was started."""
        self.encode_bytes = 0
        """Device memory that the encode under way needs at most."""

    @property
    def is_encoding(self) -> bool:
        return bool(self._encoding)

    @property
    def encode_overlaps_chunk(self) -> bool:
        """Whether the encode under way was started during a chunk: its time is no measure."""
        return self._encode_during is not None

    @property
    def under_way(self) -> set[str]:
        """The requests of the disk read and of the encode under way; they may have ended."""
        reading = set() if self._disk_reading is None else {self._disk_reading}
        return reading | set(self._encoding)

    def on_device(self, prefills: Sequence[PrefillWork], *, is_decoding: bool) -> OnDevice:
        """The requests of all work under way, with that of these `prefills`."""
        return OnDevice(
            prefilling=_group_ids(chunk.request_id for chunk in prefills),
            encoding=_group_ids(self._encoding),
            reading=() if self._disk_reading is None else _group_ids([self._disk_reading]),
            is_decoding=is_decoding,
        )

    @property
    def is_text_waiting(self) -> bool:
        """Whether a prompt without media waits for its prefill, which an encode would slow."""
        return any(
            r.state is State.PREFILL and not r.has_uncached_media for r in self._requests.values()
        )

    def next_to_read_disk(self) -> Request | None:
        """The request whose disk read is next; None during another."""
        if self._disk_reading is not None:
            return None
        requests = self._requests.values()
        return next((r for r in requests if r.state is State.READING_DISK), None)

    def next_to_encode(self, during: Request | None) -> Request | None:
        """The request whose media are next; None if it is a prompt's turn, or no request waits.

        during: the request one of whose last chunks is prefilled at the same time, if any.
        """
        encoding = [r for r in self._requests.values() if r.state is State.ENCODING]
        if self._encoding or not encoding or self._partly_scored is not None:
            return None
        can_prefill = self.next_to_prefill() is not None
        candidates = [
            _encode_candidate(r)
            for r in self._requests.values()
            if r is not during
            and (r.state is State.ENCODING or (can_prefill and _has_media_chunk(r)))
        ]
        request_id = fair_turn(candidates, self._last_media)
        return next((r for r in encoding if r.request_id == request_id), None)

    def encodes_after(self, request: Request) -> Iterator[Request]:
        """The encoder's turns after one of `request`, assuming that no new request arrives.

        They end before a prompt's turn, even if the prompt waits for room in the decode batch:
        there may be room at any time.
        """
        turn, num_encoded = request, Counter[str]()
        requests_with_media = [
            r for r in self._requests.values() if r.state is State.ENCODING or _has_media_chunk(r)
        ]
        while True:
            num_encoded[turn.request_id] += 1
            candidates = [
                _encode_candidate(r, num_encoded[r.request_id]) for r in requests_with_media
            ]
            request_id = fair_turn(candidates, turn.request_id)
            turn = next(r for r in requests_with_media if r.request_id == request_id)
            if len(turn.encode_lengths) <= num_encoded[turn.request_id]:
                return
            yield turn

    def next_to_prefill(self, waiting: Collection[Request] = ()) -> Request | None:
        """The request whose chunk is next; none with media during an encode, and none of `waiting`.

        The decode batch has room for the sequences of every request whose prefill has begun.
        """
        return self._partly_scored or self._prefill_turn(self._last_prefill, waiting)

    @property
    def _partly_scored(self) -> Request | None:
        """The request with an option of which a part is scored, if there is one."""
        in_prefill = (r for r in self._requests.values() if r.state is State.PREFILL)
        return next((r for r in in_prefill if r.scoring.start), None)

    def prefills_after(self, request: Request) -> Iterator[Request]:
        """The prefill's turns after one of `request`, assuming that no new request arrives.

        Also assumes that each turn prefills the rest of its prompt.
        """
        turn, prefilled = request, list[Request]()
        while True:
            prefilled.append(turn)
            next_turn = self._prefill_turn(turn.request_id, prefilled)
            if next_turn is None:
                return
            turn = next_turn
            yield turn

    def _prefill_turn(self, last_id: str | None, prefilled: Collection[Request]) -> Request | None:
        """The request to prefill after `last_id`, once those in `prefilled` are done."""
        candidates = [
            _prefill_candidate(r)
            for r in self._requests.values()
            if r.state is State.PREFILL
            and r not in prefilled
            and (
                not (r.has_uncached_media and self._encoding) or r.request_id == self._encode_during
            )
        ]
        num_seqs = sum(
            len(r.seqs) for r in self._requests.values() if r.is_known_to_runner or r in prefilled
        )
        num_begun_seqs = sum(candidate.num_seqs for candidate in candidates if candidate.is_begun)
        room = self._max_num_seqs - num_seqs + num_begun_seqs
        request_id = fair_turn(candidates, last_id, room)
        return None if request_id is None else self._requests[request_id]

    def start_disk_read(self, request: Request) -> None:
        """Record that the disk reader begins with `request`."""
        self._disk_reading = request.request_id

    def finish_disk_read(self) -> None:
        """Record that the disk reader is done."""
        self._disk_reading = None

    def start_encode(
        self, encodes: Sequence[EncodeWork], during: Request | None, encode_bytes: int
    ) -> None:
        """Record that the encoder begins with `encodes`, maybe during a chunk of `during`."""
        self.encode_bytes = encode_bytes
        self._last_media = encodes[-1].request_id
        self._encoding = tuple(dict.fromkeys(encode.request_id for encode in encodes))
        self._encode_during = None if during is None else during.request_id

    def finish_encode(self) -> None:
        """Record that the encoder is done."""
        assert self._encoding
        self._encoding, self.encode_bytes = (), 0

    def start_chunk(self, request: Request) -> None:
        """Record that the next step has a chunk of `request`."""
        self._last_prefill = request.request_id
        if request.has_uncached_media:
            self._last_media = request.request_id


def _group_ids(request_ids: Iterable[str]) -> tuple[str, ...]:
    """The ids by which the front knows these requests, each once."""
    return tuple(dict.fromkeys(map(group_id_of, request_ids)))


def _has_media_chunk(request: Request) -> bool:
    return request.state is State.PREFILL and request.has_uncached_media


def _encode_candidate(request: Request, num_encoded: int = 0) -> TurnCandidate:
    """A candidate for the encoder; its remaining work: all tokens to encode and to prefill.

    num_encoded: the number of its media to assume encoded in addition.
    """
    num_left = request.num_prefill_tokens_left + sum(request.encode_lengths[num_encoded:])
    return TurnCandidate(request.request_id, num_left, request.is_begun or num_encoded > 0)


def _prefill_candidate(request: Request) -> TurnCandidate:
    """A candidate for the prefill's turn, at whose end all its sequences join the decode batch.

    One that scores options counts as not begun: there may be so many that a short request must not
    wait for the end of any of those with more.
    """
    return TurnCandidate(
        request.request_id,
        request.num_prefill_tokens_left,
        request.is_known_to_runner and not request.is_scoring,
        num_seqs=len(request.choices),
    )
