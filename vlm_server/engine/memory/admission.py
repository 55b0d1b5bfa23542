"""Admission: whether device memory suffices for a further request, given the needs of others."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from vlm_server.engine.memory.governor import Governor
from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State
from vlm_server.errors import MemoryExceeded
from vlm_server.settings import MIB

_UNBOUNDED_ANSWER_TOKENS = 2048
"""The length reserved for an answer that may fill the context: hardly any does."""


class Admission:
    """Computes the memory needs of requests, and asks the governor for room. Changes no request.

    A request's resident bytes are those of its KV at its end; its transient bytes are its
    additional needs at its peak, learned from earlier requests.
    """

    def __init__(
        self, governor: Governor, kv_bytes: Callable[[int], int], max_chunk_tokens: int
    ) -> None:
        """`kv_bytes`: see `interfaces.Runner.kv_bytes`."""
        self._governor = governor
        self._kv_bytes = kv_bytes
        self._max_chunk_tokens = max_chunk_tokens
        self._last_waiting: str | None = None
        """The request counted last as waiting, so that each wait is counted once."""

    def decide(
        self, request: Request, admitted: Sequence[Request], *, some_are_ending: bool
    ) -> int | None:
        """Make room for `request` in addition to those `admitted` (`Governor.make_room`).

        Returns the bytes to reserve for its peak; None if it has to wait for memory that others
        hold. some_are_ending: whether ended requests still hold some. Raises MemoryExceeded if the
        request does not fit even alone.
        """
        alone = self._resident([request])
        if not self._governor.fits_alone(alone):
            self._governor.count_decision("refuse")
            raise self._too_large(request, alone)
        transient = self._transient(request, admitted)
        theirs = [r.transient_bytes for r in admitted if r.state is not State.DECODE]
        added = self._resident([request, *admitted]) - self._resident(admitted)
        has_room = self._governor.make_room(
            added + request.disk_read_bytes + max([transient, *theirs]),
            self.reserved_bytes(admitted),
            others_run=bool(admitted) or some_are_ending,
            some_are_ending=some_are_ending,
        )
        if has_room:
            return transient
        if not some_are_ending and self._last_waiting != request.request_id:
            self._last_waiting = request.request_id
            self._governor.count_decision("wait")
        return None

    def _too_large(self, request: Request, needed_bytes: int) -> MemoryExceeded:
        free_bytes = self._governor.free_bytes
        largest = self._largest_answer(request, free_bytes)
        advice = f" `max_tokens` may be at most {largest}." if largest else ""
        return MemoryExceeded(
            f"This request needs up to {needed_bytes / MIB:.0f} MiB of device memory; "
            f"{free_bytes / MIB:.0f} MiB are available besides the model.{advice}",
            "max_tokens" if largest else None,
        )

    def fits_disk_read(self, request: Request) -> bool:
        """Whether the entries to read from disk fit in addition to `request`, if it runs alone.

        If not, its prompt is computed instead.
        """
        disk_read = request.disk_read
        if disk_read is None:
            return True
        taken = disk_read.size_bytes + disk_read.transient_bytes
        return self._resident([request]) + taken <= self._governor.free_bytes

    def reserved_bytes(self, admitted: Sequence[Request]) -> int:
        """Bytes that `admitted` requests, and their disk reads, may still allocate."""
        decoding = [r for r in admitted if r.state is State.DECODE]
        held = self._batch_bytes(decoding, lambda r: r.num_kv_tokens)
        held += sum(
            self._kv_bytes(r.num_kv_tokens)
            for r in admitted
            if r.state is State.PREFILL and r.is_known_to_runner
        )
        to_read = sum(r.disk_read_bytes for r in admitted)
        return max(0, self._resident(admitted) - held) + to_read

    def make_room_for_reserved(self, admitted: Sequence[Request]) -> None:
        """Evict cache entries that occupy memory reserved for `admitted`."""
        if reserved := self.reserved_bytes(admitted):
            self._governor.make_room_for_reserved(reserved)

    def fit_concurrently(self, requests: Iterable[Request], admitted: Sequence[Request]) -> bool:
        """Whether these requests may peak at the same time; each was admitted for its own peak."""
        reserved = self.reserved_bytes(admitted)
        return self._governor.has_room(reserved + sum(r.transient_bytes for r in requests))

    def fits_encode(
        self, num_tokens: int, requests: Iterable[Request], admitted: Sequence[Request]
    ) -> bool:
        """Whether `num_tokens` of media of these requests may be encoded in one call.

        Each request was admitted for one encode at a time, and for the features of all its media.
        """
        needed = self._governor.estimator.bytes_for("encode", num_tokens)
        needed += sum(r.transient_bytes for r in requests)
        return self._governor.has_room(self.reserved_bytes(admitted) + needed)

    def fits_prefill(
        self, num_tokens: int, requests: Sequence[Request], admitted: Sequence[Request]
    ) -> bool:
        """Whether the prompts of `requests` may be prefilled in one call.

        num_tokens: the maximum number of tokens to prefill of each. Each request was admitted for
        its own prefill and for joining the running ones; the KV of the batch comes on top.
        """
        needed = self._governor.estimator.bytes_for("prefill", len(requests) * num_tokens)
        longest = max(r.prompt.num_tokens for r in requests)
        needed += len(requests) * self._kv_bytes(longest)
        needed += max(r.transient_bytes for r in requests)
        return self._governor.has_room(self.reserved_bytes(admitted) + needed)

    def _transient(self, request: Request, admitted: Sequence[Request]) -> int:
        """Bytes at its peak: during a disk read, an encode, a chunk, or joining the others.

        Joining copies all sequences once. The features of its media come on top, and a second time
        as part of the prompt's embeddings.
        """
        prompt, cached = request.prompt, request.num_cached_tokens
        batch = [request, *admitted]
        to_encode = request.encode_lengths
        chunk = max(
            min(self._max_chunk_tokens, prompt.num_tokens - cached),
            prompt.atomic_prefill_tokens - cached,
        )
        estimator = self._governor.estimator
        joining = self._batch_bytes(batch, _width_when_joined) if _num_seqs(batch) > 1 else 0
        worst = max(
            estimator.bytes_for("encode", max(to_encode, default=0)),
            estimator.bytes_for("prefill", chunk),
            joining,
            0 if request.disk_read is None else request.disk_read.transient_bytes,
        )
        features = request.num_media_tokens + sum(to_encode)
        return worst + features * estimator.feature_bytes

    def _resident(self, requests: Sequence[Request]) -> int:
        """Bytes of the batch's KV at the end of its longest request."""
        return self._batch_bytes(requests, _final_width)

    def _largest_answer(self, request: Request, free_bytes: int) -> int:
        """The maximum length of an answer that fits into memory; 0 if none does."""

        def is_too_long(num_tokens: int) -> bool:
            width = request.prompt.num_tokens + num_tokens
            return self._batch_bytes([request], lambda _: width) > free_bytes

        return bisect_left(range(1, request.max_tokens + 1), True, key=is_too_long)

    def _batch_bytes(self, requests: Sequence[Request], width: Callable[[Request], int]) -> int:
        """Bytes of one batch: all its sequences are padded to the longest."""
        return _num_seqs(requests) * self._kv_bytes(max(map(width, requests), default=0))


def _num_seqs(requests: Sequence[Request]) -> int:
    return sum(len(r.seqs) for r in requests)


def _final_width(request: Request) -> int:
    """The maximum number of tokens of its prompt and an answer."""
    answer = request.max_tokens
    wanted = request.sampling.max_tokens
    if wanted is None or wanted > answer:
        answer = min(answer, _UNBOUNDED_ANSWER_TOKENS)
    return request.prompt.num_tokens + answer


def _width_when_joined(request: Request) -> int:
    """Tokens of its sequences if a further one joined now."""
    return max(request.prompt.num_tokens, request.num_kv_tokens)
