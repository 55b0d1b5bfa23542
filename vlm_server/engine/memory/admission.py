"""Admission: whether device memory suffices for a further request, given the needs of others."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from vlm_server.engine.memory.governor import Governor
from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State
from vlm_server.errors import MemoryExceeded
from vlm_server.sizes import memory_size

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

    def make_room_for(
        self, request: Request, admitted: Sequence[Request], *, some_are_ending: bool
    ) -> int | None:
        """Make room for `request` in addition to those `admitted` (`Governor.make_room`).

        Returns the bytes to reserve for its peak; None if it has to wait for memory that others
        hold. some_are_ending: whether ended requests still hold some. Raises MemoryExceeded if the
        request does not fit even alone.
        """
        resident_bytes = self._resident_bytes([request])
        if not self._governor.fits_alone(resident_bytes):
            self._governor.count_decision("refuse")
            raise self._too_large(request, resident_bytes)
        transient_bytes = self._transient_bytes(request, admitted)
        peaks = [r.transient_bytes for r in admitted if r.state is not State.DECODE]
        added_bytes = self._resident_bytes([request, *admitted]) - self._resident_bytes(admitted)
        has_room = self._governor.make_room(
            added_bytes + request.disk_read_bytes + max([transient_bytes, *peaks]),
            self.reserved_bytes(admitted),
            others_run=bool(admitted) or some_are_ending,
            some_are_ending=some_are_ending,
        )
        if has_room:
            return transient_bytes
        if not some_are_ending and self._last_waiting != request.request_id:
            self._last_waiting = request.request_id
            self._governor.count_decision("wait")
        return None

    def _too_large(self, request: Request, needed_bytes: int) -> MemoryExceeded:
        available_bytes = self._governor.bytes_for_requests
        largest = self._largest_answer(request, available_bytes)
        advice = f" `max_tokens` may be at most {largest}." if largest else ""
        return MemoryExceeded(
            f"This request needs up to {memory_size(needed_bytes)} of device memory; "
            f"{memory_size(available_bytes)} are available besides the model.{advice}",
            "max_tokens" if largest else None,
        )

    def fits_disk_read(self, request: Request) -> bool:
        """Whether the entries to read from disk fit in addition to `request`, if it runs alone.

        If not, its prompt is computed instead.
        """
        disk_read = request.disk_read
        if disk_read is None:
            return True
        read_bytes = disk_read.size_bytes + disk_read.transient_bytes
        return self._resident_bytes([request]) + read_bytes <= self._governor.bytes_for_requests

    def reserved_bytes(self, admitted: Sequence[Request]) -> int:
        """Bytes that `admitted` requests, and their disk reads, may still allocate."""
        decoding = [r for r in admitted if r.state is State.DECODE]
        allocated_bytes = self._batch_bytes(decoding, lambda r: r.num_kv_tokens)
        allocated_bytes += sum(
            self._kv_bytes(r.num_kv_tokens)
            for r in admitted
            if r.state is State.PREFILL and r.is_known_to_runner
        )
        disk_read_bytes = sum(r.disk_read_bytes for r in admitted)
        return max(0, self._resident_bytes(admitted) - allocated_bytes) + disk_read_bytes

    def make_room_for_reserved(self, admitted: Sequence[Request]) -> None:
        """Evict cache entries that occupy memory reserved for `admitted`."""
        if reserved_bytes := self.reserved_bytes(admitted):
            self._governor.make_room_for_reserved(reserved_bytes)

    def fit_concurrently(self, requests: Iterable[Request], admitted: Sequence[Request]) -> bool:
        """Whether these requests may peak at the same time; each was admitted for its own peak."""
        reserved_bytes = self.reserved_bytes(admitted)
        return self._governor.has_room(reserved_bytes + sum(r.transient_bytes for r in requests))

    def fits_encode(
        self, num_tokens: int, requests: Iterable[Request], admitted: Sequence[Request]
    ) -> bool:
        """Whether `num_tokens` of media of these requests may be encoded in one call.

        Each request was admitted for one encode at a time, and for the features of all its media.
        """
        needed_bytes = self.encode_bytes(num_tokens, requests)
        return self._governor.has_room(self.reserved_bytes(admitted) + needed_bytes)

    def encode_bytes(self, num_tokens: int, requests: Iterable[Request]) -> int:
        """Bytes that an encode of `num_tokens` of media of these requests needs at most."""
        encode_bytes = self._governor.estimator.bytes_for("encode", num_tokens)
        return encode_bytes + sum(r.transient_bytes for r in requests)

    def fits_prefill(
        self, num_tokens: int, requests: Sequence[Request], admitted: Sequence[Request]
    ) -> bool:
        """Whether the prompts of `requests` may be prefilled in one call.

        num_tokens: the maximum number of tokens to prefill of each. Each request was admitted for
        its own prefill and for joining the running ones; the KV of the batch comes on top.
        """
        needed_bytes = self._governor.estimator.bytes_for("prefill", len(requests) * num_tokens)
        longest = max(r.prompt.num_tokens for r in requests)
        needed_bytes += len(requests) * self._kv_bytes(longest)
        needed_bytes += max(r.transient_bytes for r in requests)
        return self._governor.has_room(self.reserved_bytes(admitted) + needed_bytes)

    def fits_branches(
        self,
        request: Request,
        count: int,
        num_tokens: int,
        admitted: Sequence[Request],
        *,
        encode_bytes: int,
    ) -> bool:
        """Whether `count` options of `request`, of `num_tokens` in all, may be scored in one step.

        The request was admitted for one of the longest. encode_bytes: of the encode under way.
        """
        needed_bytes = self._branch_bytes(request, count, num_tokens) + encode_bytes
        return self._governor.has_room(self.reserved_bytes(admitted) + needed_bytes)

    def _branch_bytes(self, request: Request, count: int, num_tokens: int) -> int:
        """Bytes of `count` branches: copies of the prompt's KV, and what their tokens need."""
        longest = len(request.prompt.options[-1])
        kv_bytes = self._kv_bytes(request.prompt.num_tokens + longest)
        prefill_bytes = self._governor.estimator.bytes_for("prefill", num_tokens)
        return count * kv_bytes + num_tokens * request.logit_bytes + prefill_bytes

    def _transient_bytes(self, request: Request, admitted: Sequence[Request]) -> int:
        """Bytes at its peak: in a disk read, an encode, a chunk, a branch, or joining the others.

        Joining copies all sequences once. The features of its media come on top, and a second time
        as part of the prompt's embeddings.
        """
        prompt, num_cached = request.prompt, request.num_cached_tokens
        batch = [request, *admitted]
        encode_lengths = request.encode_lengths
        chunk = max(
            min(self._max_chunk_tokens, prompt.num_tokens - num_cached),
            prompt.atomic_prefill_tokens - num_cached,
        )
        estimator = self._governor.estimator
        longest = len(prompt.options[-1]) if prompt.options else 0
        join_bytes = self._batch_bytes(batch, _length_when_joined) if _num_seqs(batch) > 1 else 0
        peak_bytes = max(
            estimator.bytes_for("encode", max(encode_lengths, default=0)),
            estimator.bytes_for("prefill", chunk),
            join_bytes,
            self._branch_bytes(request, 1, longest) if longest else 0,
            0 if request.disk_read is None else request.disk_read.transient_bytes,
        )
        feature_tokens = request.num_media_tokens + sum(encode_lengths)
        return peak_bytes + feature_tokens * estimator.feature_bytes

    def _resident_bytes(self, requests: Sequence[Request]) -> int:
        """Bytes of the batch's KV at the end of its longest request."""
        return self._batch_bytes(requests, _final_length)

    def _largest_answer(self, request: Request, available_bytes: int) -> int:
        """The maximum length of an answer that fits into memory; 0 if none does."""

        def is_too_long(num_tokens: int) -> bool:
            length = request.prompt.num_tokens + num_tokens
            return self._batch_bytes([request], lambda _: length) > available_bytes

        return bisect_left(range(1, request.max_tokens + 1), True, key=is_too_long)

    def _batch_bytes(self, requests: Sequence[Request], length: Callable[[Request], int]) -> int:
        """Bytes of one batch: all its sequences are padded to the longest."""
        return _num_seqs(requests) * self._kv_bytes(max(map(length, requests), default=0))


def _num_seqs(requests: Sequence[Request]) -> int:
    """Sequences whose KV is held; a prompt to score is one until its end."""
    return sum(len(r.seqs) or 1 for r in requests)


def _final_length(request: Request) -> int:
    """The maximum number of tokens of its prompt and an answer."""
    answer_tokens = request.max_tokens
    max_tokens = request.sampling.max_tokens
    if max_tokens is None or max_tokens > answer_tokens:
        answer_tokens = min(answer_tokens, _UNBOUNDED_ANSWER_TOKENS)
    return request.prompt.num_tokens + answer_tokens


def _length_when_joined(request: Request) -> int:
    """Tokens of its sequences if a further one joined now."""
    return max(request.prompt.num_tokens, request.num_kv_tokens)
