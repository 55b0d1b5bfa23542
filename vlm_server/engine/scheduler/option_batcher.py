"""How many options of a question are scored in one step, or how many tokens of a long one."""

from __future__ import annotations

from collections.abc import Sequence

from vlm_server.engine.memory.admission import Admission
from vlm_server.engine.request.option_progress import OptionProgress
from vlm_server.engine.request.request import Request
from vlm_server.engine.scheduler.config import SchedulerConfig
from vlm_server.engine.scheduler.live_requests import LiveRequests
from vlm_server.engine.scheduler.sizing.chunk_sizer import ChunkSizer
from vlm_server.interfaces import Branches
from vlm_server.interfaces.prompts import MAX_OPTION_TOKENS

_FIRST_TOKENS = 32
"""Tokens of a step before any measurement."""
_FEW_TOKENS = 32
"""Tokens of a call that may be padding for the most part: fewer calls are better then."""
_MAX_PADDING = 1.5
"""Tokens of a larger call with padding, as a multiple of those without."""


class OptionBatcher:
    """Takes as many options into a step as time and memory allow: one at least, or a part of it.

    A step has `MAX_OPTION_TOKENS` at most. Options come with the shortest first, so that padding
    is small.
    """

    def __init__(
        self, config: SchedulerConfig, requests: LiveRequests, admission: Admission
    ) -> None:
        self._can_batch = config.batches_options
        self._requests = requests
        self._admission = admission
        self._sizer = ChunkSizer(config.max_step_seconds, MAX_OPTION_TOKENS, _FIRST_TOKENS)

    def record(self, num_tokens: int, seconds: float, num_before: int) -> None:
        """Record the time of a step with branches of `num_tokens`, of a prompt of `num_before`."""
        self._sizer.record(num_tokens, seconds, num_before)

    def record_failure(self, num_tokens: int) -> None:
        """Take half as many tokens after a step that was too much for the device."""
        self._sizer.record_failure(num_tokens)

    def may_score(self, request: Request, encode_bytes: int) -> bool:
        """Whether there is memory for an option of `request` beside an encode of `encode_bytes`.

        Without an encode there is: it was reserved. For the rest of an option, too: it was found
        before the first part.
        """
        if not encode_bytes or request.scoring.start:
            return True
        first = request.scoring.num_scored
        option = Branches(first, first + 1, request.scoring.lengths[first])
        return self._fit(request, [option], encode_bytes)

    def next_branches(
        self, request: Request, *, others_decode: bool, encode_bytes: int
    ) -> tuple[Branches, ...]:
        """The options of `request` to score in the next step: those of each call.

        One, or a part of it, in any case: ask `may_score` first, once for a plan, since an encode
        allocates meanwhile. encode_bytes: as there.
        """
        scoring = request.scoring
        max_tokens = self._sizer.chunk_tokens(
            scoring.num_padded_tokens_left, request.prompt.num_tokens, others_decode=others_decode
        )
        max_options = len(scoring.lengths) if self._can_batch else 1
        branches = branches_of(scoring, max_tokens, max_options)
        while (count := branches[-1].end - branches[0].first) > 1 and not self._fit(
            request, branches, encode_bytes
        ):
            branches = branches_of(scoring, max_tokens, count // 2)
        return branches

    def _fit(self, request: Request, branches: Sequence[Branches], encode_bytes: int) -> bool:
        """Whether there is memory for `branches` beside an encode of `encode_bytes`."""
        return self._admission.fits_branches(
            request,
            branches[-1].end - branches[0].first,
            sum(each.num_tokens for each in branches),
            self._requests.admitted,
            encode_bytes=encode_bytes,
        )


def branches_of(scoring: OptionProgress, max_tokens: int, max_options: int) -> tuple[Branches, ...]:
    """As many of the next options as fit, or a part of one; a call has little padding."""
    lengths, first, start = scoring.lengths, scoring.num_scored, scoring.start
    width = min(lengths[first], start + max_tokens)
    calls = [Branches(first, first + 1, width, start)]
    if width < lengths[first]:
        return tuple(calls)
    for index in range(first + 1, min(len(lengths), first + max_options)):
        *earlier, last = calls
        longer = last._replace(end=index + 1, width=lengths[index])
        if last.start or longer.num_tokens > max(
            _FEW_TOKENS, _MAX_PADDING * sum(lengths[longer.first : longer.end])
        ):
            earlier, longer = calls, Branches(index, index + 1, lengths[index])
        if sum(each.num_tokens for each in (*earlier, longer)) > max_tokens:
            break
        calls = [*earlier, longer]
    return tuple(calls)
