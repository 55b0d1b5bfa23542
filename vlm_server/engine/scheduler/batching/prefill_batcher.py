"""Which short prompts are prefilled in one call, so that nobody's first token comes later for it.

They are those whose turns would come one after the other anyway, as long as each fits whole into
the same step. The first of them gets its first token about when it would alone, and the others
sooner (`PrefillSizer`); whose turn comes next waits no longer either. While answers are written, a
step with several prompts lasts no longer than one with a prefill chunk may.

All of them start after the shortest prefix that is cached of any; a prompt of which a few tokens
more are cached computes those again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

from vlm_server.engine.memory.admission import Admission
from vlm_server.engine.request.request import Request
from vlm_server.engine.scheduler.arbiter import EncoderPrefillArbiter
from vlm_server.engine.scheduler.batching.prefill_sizer import PrefillSizer
from vlm_server.engine.scheduler.limits import SchedulerConfig
from vlm_server.engine.scheduler.requests import Requests

_MOST_SECONDS = 0.25
"""Of a step with several prompts, while nobody is answered: who comes meanwhile waits for it."""
_MOST_TOKENS_AGAIN = 64
"""That are cached of one prompt, and computed again with others."""


class PrefillBatcher:
    """Adds to a prompt those that are prefilled with it.

    Changes no request, but looks again what is cached of its prompt.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        requests: Requests,
        arbiter: EncoderPrefillArbiter,
        admission: Admission,
    ) -> None:
        self._most = config.max_prompts_per_prefill
        self._max_tokens = config.prefill_chunk_tokens
        self._max_step_seconds = config.max_step_seconds
        self._requests = requests
        self._arbiter = arbiter
        self._admission = admission
        self._sizer = PrefillSizer()

    def note(
        self, requests: Sequence[Request], seconds: float | None, *, others_decode: bool
    ) -> None:
        """The whole rests of these were prefilled in `seconds` together; None if that failed.

        What fails does not pay: each is then prefilled once more. Beside an encode a chunk takes
        longer, which says nothing.
        """
        if self._arbiter.encoding or any(one.has_uncached_media for one in requests):
            return
        if seconds is None and len(requests) == 1:
            return
        took = math.inf if seconds is None else seconds
        self._sizer.note(_longest(requests), len(requests), took, others_decode=others_decode)

    def together(self, request: Request, *, others_decode: bool) -> list[Request]:
        """`request`, whose turn it is and whose prefill is about to begin, and those with it.

        They are to begin after the least number of cached tokens of any of them.
        """
        if self._most == 1 or self._arbiter.encoding or request.has_uncached_media:
            return [request]
        found = [request, *islice(self._run(request), self._most - 1)]
        longest = [_longest(found[: count + 1]) for count in range(len(found))]
        most_seconds = self._max_step_seconds if others_decode else _MOST_SECONDS
        count = self._sizer.at_once(longest, most_seconds, others_decode=others_decode)
        while count > 1 and not self._fit(found[:count]):
            count //= 2
        return found[:count]

    def _run(self, request: Request) -> Iterator[Request]:
        """What would be prefilled after `request` in a chunk each, until another one's turn."""
        found = [request]
        for turn in self._arbiter.prefills_after(request):
            if turn.is_known_to_runner or turn.has_uncached_media:
                return
            turn.rematch_prefix()
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
    """Tokens that each row has, of the prompts of `requests` from their common beginning on."""
    start = min(request.num_cached_tokens for request in requests)
    return max(request.prompt.num_tokens for request in requests) - start


def _is_causal_text_after(request: Request, num_tokens: int) -> bool:
    """Whether there are no media after so many tokens, and none attends to later ones."""
    prompt = request.prompt
    ends = [span.end for span in prompt.spans[-1:]]
    return max([prompt.atomic_prefill_tokens, *ends]) <= num_tokens
