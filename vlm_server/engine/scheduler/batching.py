"""Which images are encoded, and which prompts prefilled, in one call of the device.

Both batchers only read requests. They take what the device would do one after the other anyway, so
that no first token comes later for it, and as much as measurements say is sooner (`sizing`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

from vlm_server.engine.memory.admission import Admission
from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State
from vlm_server.engine.scheduler.config import SchedulerConfig
from vlm_server.engine.scheduler.requests import Requests
from vlm_server.engine.scheduler.sizing import EncodeSizer, PrefillSizer
from vlm_server.interfaces import EncodeWork

_MOST_SECONDS = 0.25
"""Of a call with several images or prompts while no sequence decodes: a request that comes
meanwhile waits for it. Otherwise such a call lasts no longer than a prefill chunk may."""
_MOST_TOKENS_AGAIN = 64
"""Cached tokens of a prompt that may be computed again, to batch it with others."""


class EncodeBatcher:
    """Adds to an image those of the same size that are encoded with it.

    Those are the images that would be encoded next, until it is a prompt's turn: of one request, or
    of two that take turns. Or an image each of two requests, if both take about as long as one.
    """

    def __init__(self, config: SchedulerConfig, requests: Requests, admission: Admission) -> None:
        self._most = config.max_images_per_encode
        self._max_step_seconds = config.max_step_seconds
        self._requests = requests
        self._admission = admission
        self._sizer = EncodeSizer(self._most)

    def record(self, works: Sequence[EncodeWork], seconds: float | None) -> None:
        """`works` took `seconds` together, with no prompt's chunk beside them; see `EncodeDone`.

        What fails does not pay: each image is then encoded once more.
        """
        if seconds is not None and (len(works) > 1 or math.isfinite(seconds)):
            self._sizer.record(works[0].num_tokens, len(works), seconds)

    def batch(self, first: EncodeWork, turns: Iterator[Request]) -> list[EncodeWork]:
        """`first`, whose turn it is, and what is encoded with it.

        turns: the requests whose images would be encoded after it, one image in each turn.
        """
        if self._most == 1:
            return [first]
        works = [first, *islice(self._alike(first, turns), self._most - 1)]
        is_decoding = any(self._requests.in_state(State.DECODE))
        most_seconds = self._max_step_seconds if is_decoding else _MOST_SECONDS
        count = self._sizer.at_once(first.num_tokens, len(works), most_seconds)
        if len(works) == 1:
            works += self._of_next_request(first)
            as_one = self._sizer.two_are_as_one(first.num_tokens, self._max_step_seconds)
            count = 2 if len(works) == 2 and as_one else 1
        while count > 1 and not self._fit(works[:count]):
            count //= 2
        return works[:count]

    def _alike(self, first: EncodeWork, turns: Iterator[Request]) -> Iterator[EncodeWork]:
        """The images of the next `turns`, as long as they are new and of the size of `first`."""
        own = self._requests[first.request_id].media_to_encode()
        next(own, None)  # that is `first`, unless the disk reader has just put it into memory
        media, seen = {first.request_id: own}, {first.span.mm_hash}
        for turn in turns:
            work = next(media.setdefault(turn.request_id, turn.media_to_encode()), None)
            if work is None or work.size != first.size or work.span.mm_hash in seen:
                return
            seen.add(work.span.mm_hash)
            yield work

    def _of_next_request(self, first: EncodeWork) -> list[EncodeWork]:
        """The first image of the next request that waits, if it can go with `first`.

        None if another request is begun already: at most two ever are.
        """
        others = [
            request
            for request in self._requests.in_state(State.ENCODING)
            if request.request_id != first.request_id
        ]
        if any(one.is_begun for one in (*others, *self._requests.in_state(State.PREFILL))):
            return []
        work = next(others[0].media_to_encode(), None) if others else None
        if work is None or work.size != first.size or work.span.mm_hash == first.span.mm_hash:
            return []
        return [work]

    def _fit(self, works: Sequence[EncodeWork]) -> bool:
        """Whether there is memory for all at once; for each alone it is reserved."""
        num_tokens = sum(work.num_tokens for work in works)
        requests = [self._requests[name] for name in {work.request_id for work in works}]
        return self._admission.fits_encode(num_tokens, requests, self._requests.admitted)


class PrefillBatcher:
    """Adds to a short prompt those that are prefilled with it.

    Those are the prompts whose turns come next, as long as each fits whole into the same step. All
    begin after the shortest prefix that is cached of any; a prompt of which a few tokens more are
    cached computes those again.
    """

    def __init__(self, config: SchedulerConfig, requests: Requests, admission: Admission) -> None:
        self._most = config.max_prompts_per_prefill
        self._max_tokens = config.prefill_chunk_tokens
        self._max_step_seconds = config.max_step_seconds
        self._requests = requests
        self._admission = admission
        self._sizer = PrefillSizer()

    def record(
        self, requests: Sequence[Request], seconds: float | None, *, others_decode: bool
    ) -> None:
        """The whole rests of these prompts took `seconds` together; None if that failed.

        What fails does not pay: each prompt is then prefilled once more.
        """
        if any(one.has_uncached_media for one in requests):
            return
        if seconds is None and len(requests) == 1:
            return
        took = math.inf if seconds is None else seconds
        self._sizer.record(_longest(requests), len(requests), took, others_decode=others_decode)

    def batch(
        self, request: Request, turns: Iterator[Request], *, others_decode: bool
    ) -> list[Request]:
        """`request`, whose turn it is and whose prefill is about to begin, and those with it.

        turns: the requests that would be prefilled after it, in a chunk each.
        """
        if self._most == 1 or request.has_uncached_media:
            return [request]
        found = [request, *islice(self._short(request, turns), self._most - 1)]
        longest = [_longest(found[: count + 1]) for count in range(len(found))]
        most_seconds = self._max_step_seconds if others_decode else _MOST_SECONDS
        count = self._sizer.at_once(longest, most_seconds, others_decode=others_decode)
        while count > 1 and not self._fit(found[:count]):
            count //= 2
        return found[:count]

    def _short(self, request: Request, turns: Iterator[Request]) -> Iterator[Request]:
        """The next of `turns`, as long as all their prompts may be in one call."""
        found = [request]
        for turn in turns:
            if turn.is_known_to_runner or turn.has_uncached_media:
                return
            found.append(turn)
            cached = [one.num_cached_tokens for one in found]
            is_much = len(found) * _longest(found) > self._max_tokens
            if is_much or max(cached) - min(cached) > _MOST_TOKENS_AGAIN:
                return
            if not all(_is_causal_text_after(one, min(cached)) for one in found):
                return
            yield turn

    def _fit(self, requests: Sequence[Request]) -> bool:
        """Whether there is memory for all at once; for each alone it is reserved."""
        return self._admission.fits_prefill(_longest(requests), requests, self._requests.admitted)


def _longest(requests: Sequence[Request]) -> int:
    """Tokens of each row: of the longest of the prompts, from their common beginning on."""
    start = min(request.num_cached_tokens for request in requests)
    return max(request.prompt.num_tokens for request in requests) - start


def _is_causal_text_after(request: Request, num_tokens: int) -> bool:
    """Whether there are no media after so many tokens, and none of them attends to later ones."""
    prompt = request.prompt
    ends = [span.end for span in prompt.spans[-1:]]
    return max([prompt.atomic_prefill_tokens, *ends]) <= num_tokens
