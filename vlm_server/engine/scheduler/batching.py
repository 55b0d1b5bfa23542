"""Batches of images in one encode, and of prompts in one prefill.

Both batchers only read requests. A batch takes work in the order in which it would be done anyway,
so that no first token comes later, and as much of it as measurements recommend (`sizing`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

from vlm_server.engine.memory.admission import Admission
from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State
from vlm_server.engine.scheduler.config import SchedulerConfig
from vlm_server.engine.scheduler.live_requests import LiveRequests
from vlm_server.engine.scheduler.sizing.call_times import MAX_IDLE_BATCH_SECONDS, power_of_two
from vlm_server.engine.scheduler.sizing.encode_sizer import EncodeSizer
from vlm_server.engine.scheduler.sizing.prefill_sizer import PrefillSizer
from vlm_server.interfaces import EncodeWork

_MAX_RECOMPUTED_TOKENS = 64
"""The maximum number of a prompt's cached tokens to compute again, to batch it with others."""


class EncodeBatcher:
    """Batches an image with others of the same size.

    These are the images that would be encoded next, until it is a prompt's turn: of one request, or
    of two in alternation. Or the first images of two requests, if both take about as long as one.
    """

    def __init__(
        self, config: SchedulerConfig, requests: LiveRequests, admission: Admission
    ) -> None:
        self._max_images = config.max_images_per_encode
        self._max_step_seconds = config.max_step_seconds
        self._requests = requests
        self._admission = admission
        self._sizer = EncodeSizer(self._max_images)

    def record(self, encodes: Sequence[EncodeWork], seconds: float | None) -> None:
        """Record the time of `encodes`, with no overlapping chunk; see `EncodeDone`.

        A failed batch counts as infinitely slow: each image was then encoded once more.
        """
        if seconds is not None and (len(encodes) > 1 or math.isfinite(seconds)):
            self._sizer.record(encodes[0].num_tokens, len(encodes), seconds)

    def batch(self, first: EncodeWork, turns: Iterator[Request]) -> list[EncodeWork]:
        """`first`, whose turn it is, and images to encode with it.

        turns: the requests whose images would be encoded after it, one image in each turn.
        """
        if self._max_images == 1:
            return [first]
        encodes = [first, *islice(self._next_images(first, turns), self._max_images - 1)]
        if len(encodes) == 1:
            return self._pair(first)
        is_decoding = any(self._requests.in_state(State.DECODE))
        max_seconds = self._max_step_seconds if is_decoding else MAX_IDLE_BATCH_SECONDS
        count = self._sizer.choose_num_images(first.num_tokens, len(encodes), max_seconds)
        while count > 1 and not self._fit(encodes[:count]):
            count //= 2
        return encodes[:count]

    def _next_images(self, first: EncodeWork, turns: Iterator[Request]) -> Iterator[EncodeWork]:
        """The images of the next `turns`, up to one that is a duplicate or of another size."""
        items = self._requests[first.request_id].media_to_encode()
        next(items, None)  # this is `first`, unless the disk reader has just put it into memory
        media, hashes = {first.request_id: items}, {first.span.mm_hash}
        for turn in turns:
            work = next(media.setdefault(turn.request_id, turn.media_to_encode()), None)
            if work is None or work.size != first.size or work.span.mm_hash in hashes:
                return
            hashes.add(work.span.mm_hash)
            yield work

    def _pair(self, first: EncodeWork) -> list[EncodeWork]:
        """`first`, and the first image of the next waiting request if they may be one batch."""
        second = self._first_of_next_request(first)
        if second is None or not self._sizer.may_pair(first.num_tokens, self._max_step_seconds):
            return [first]
        pair = [first, second]
        return pair if self._fit(pair) else [first]

    def _first_of_next_request(self, first: EncodeWork) -> EncodeWork | None:
        """The first image of the next waiting request; None if it can't be batched with `first`.

        None if another request is begun already: at most two ever are.
        """
        other_requests = [
            request
            for request in self._requests.in_state(State.ENCODING)
            if request.request_id != first.request_id
        ]
        if any(r.is_begun for r in (*other_requests, *self._requests.in_state(State.PREFILL))):
            return None
        work = next(other_requests[0].media_to_encode(), None) if other_requests else None
        if work is None or work.size != first.size or work.span.mm_hash == first.span.mm_hash:
            return None
        return work

    def _fit(self, encodes: Sequence[EncodeWork]) -> bool:
        """Whether there is memory for `encodes` in one call; it is reserved for each alone."""
        num_tokens = sum(encode.num_tokens for encode in encodes)
        request_ids = {encode.request_id for encode in encodes}
        requests = [self._requests[request_id] for request_id in request_ids]
        return self._admission.fits_encode(num_tokens, requests, self._requests.admitted)


class PrefillBatcher:
    """Batches a short prompt with others.

    These are the prompts whose turns come next, as long as each fits whole into the same step. All
    are prefilled from the end of the shortest cached prefix; a prompt with a slightly longer one
    computes a few tokens again.
    """

    def __init__(
        self, config: SchedulerConfig, requests: LiveRequests, admission: Admission
    ) -> None:
        self._max_prompts = config.max_prompts_per_prefill
        self._max_step_seconds = config.max_step_seconds
        self._requests = requests
        self._admission = admission
        self._sizer = PrefillSizer()

    def record(
        self, requests: Sequence[Request], seconds: float | None, *, others_decode: bool
    ) -> None:
        """Record the time of one prefill of these whole prompts; None if it failed.

        A failed batch counts as infinitely slow: each prompt is then prefilled once more.
        """
        if any(request.has_uncached_media for request in requests):
            return
        if seconds is None:
            if len(requests) == 1:
                return
            seconds = math.inf
        self._sizer.record(_longest(requests), len(requests), seconds, others_decode=others_decode)

    def batch(
        self, request: Request, turns: Iterator[Request], max_tokens: int, *, others_decode: bool
    ) -> list[Request]:
        """`request`, whose prefill is about to begin, and those to prefill with it.

        turns: the requests that would be prefilled after it, in a chunk each. max_tokens: of all
        rows together, which are as long as the longest.
        """
        if self._max_prompts == 1 or request.has_uncached_media or request.pooling is not None:
            return [request]
        batch = [
            request,
            *islice(self._next_prompts(request, turns, max_tokens), self._max_prompts - 1),
        ]
        longest = [_longest(batch[: count + 1]) for count in range(len(batch))]
        max_seconds = self._max_step_seconds if others_decode else MAX_IDLE_BATCH_SECONDS
        count = self._sizer.choose_num_prompts(longest, max_seconds, others_decode=others_decode)
        while count > 1 and not self._fit(batch[:count]):
            count //= 2
        return batch[:count]

    def _next_prompts(
        self, request: Request, turns: Iterator[Request], max_tokens: int
    ) -> Iterator[Request]:
        """The requests of the next `turns`, as long as all prompts may be in one call."""
        batch = [request]
        for turn in turns:
            if turn.is_known_to_runner or turn.has_uncached_media or turn.pooling is not None:
                return
            batch.append(turn)
            cached_lengths = [r.num_cached_tokens for r in batch]
            is_too_large = len(batch) * _longest(batch) > max_tokens
            if is_too_large or max(cached_lengths) - min(cached_lengths) > _MAX_RECOMPUTED_TOKENS:
                return
            if not all(_is_causal_text_after(r, min(cached_lengths)) for r in batch):
                return
            yield turn

    def _fit(self, requests: Sequence[Request]) -> bool:
        """Whether there is memory to prefill all in one call; it is reserved for each alone."""
        return self._admission.fits_prefill(_longest(requests), requests, self._requests.admitted)


class PoolingBatcher:
    """Batches an input to embed with others of about its length.

    They share a power of two, so that padding is never most of a batch. A larger batch takes less
    time for each input on every device, so it is bounded like a prompt's chunk.
    """

    def __init__(
        self, config: SchedulerConfig, requests: LiveRequests, admission: Admission
    ) -> None:
        self._pads = config.batches_lengths
        self._requests = requests
        self._admission = admission

    def batch(self, request: Request, others: Iterator[Request], max_tokens: int) -> list[Request]:
        """`request`, whose turn it is, and those of `others` to embed with it."""
        batch, size, longest = [request], self._size(request), request.prompt.num_tokens
        for other in others:
            if self._size(other) != size:
                continue
            longest = max(longest, other.prompt.num_tokens)
            if (len(batch) + 1) * longest > max_tokens:
                break
            batch.append(other)
        while len(batch) > 1 and not self._fit(batch):
            del batch[(len(batch) + 1) // 2 :]
        return batch

    def _size(self, request: Request) -> int:
        """The key of inputs that may be one batch."""
        num_tokens = request.prompt.num_tokens
        return power_of_two(num_tokens) if self._pads else num_tokens

    def _fit(self, requests: Sequence[Request]) -> bool:
        """Whether there is memory for all in one call; it is reserved for each alone."""
        return self._admission.fits_prefill(_longest(requests), requests, self._requests.admitted)


def _longest(requests: Sequence[Request]) -> int:
    """Tokens per row of the batch: those of the longest prompt after the shortest cached prefix."""
    start = min(request.num_cached_tokens for request in requests)
    return max(request.prompt.num_tokens for request in requests) - start


def _is_causal_text_after(request: Request, num_tokens: int) -> bool:
    """Whether no media come after `num_tokens`, and none of these attends to later tokens."""
    prompt = request.prompt
    ends = [span.end for span in prompt.spans[-1:]]
    return max([prompt.atomic_prefill_tokens, *ends]) <= num_tokens
