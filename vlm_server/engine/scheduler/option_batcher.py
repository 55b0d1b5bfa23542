"""How many options of a question are scored in one step."""

from __future__ import annotations

from vlm_server.engine.memory.admission import Admission
from vlm_server.engine.request.request import Request
from vlm_server.engine.scheduler.config import SchedulerConfig
from vlm_server.engine.scheduler.live_requests import LiveRequests
from vlm_server.engine.scheduler.sizing.chunk_sizer import ChunkSizer
from vlm_server.interfaces.prompts import MAX_OPTION_TOKENS


class OptionBatcher:
    """Takes as many options into a step as time and memory allow, and one at least.

    A step has `MAX_OPTION_TOKENS` at most. Options come with the shortest first, so that padding
    is small.
    """

    def __init__(
        self, config: SchedulerConfig, requests: LiveRequests, admission: Admission
    ) -> None:
        self._can_batch = config.batches_options
        self._requests = requests
        self._admission = admission
        self._sizer = ChunkSizer(config.max_step_seconds, MAX_OPTION_TOKENS)

    def record(self, num_tokens: int, seconds: float, num_before: int) -> None:
        """Record the time of a step with branches of `num_tokens`, of a prompt of `num_before`."""
        self._sizer.record(num_tokens, seconds, num_before)

    def record_failure(self, num_tokens: int) -> None:
        """Take half as many tokens after a step that was too much for the device."""
        self._sizer.record_failure(num_tokens)

    def next_options(self, request: Request, *, others_decode: bool) -> range:
        """The options of `request` to score in the next step."""
        prompt, first = request.prompt, request.num_scored
        lengths = [len(option) for option in prompt.options]
        num_left = sum(lengths[first:])
        max_tokens = self._sizer.chunk_tokens(
            num_left, prompt.num_tokens, others_decode=others_decode
        )
        end = first + 1
        while (
            self._can_batch
            and end < len(lengths)
            and (end + 1 - first) * lengths[end] <= max_tokens
        ):
            end += 1
        while end - first > 1 and not self._fit(request, end - first, lengths[end - 1]):
            end = first + (end - first) // 2
        return range(first, end)

    def _fit(self, request: Request, count: int, width: int) -> bool:
        """Whether there is memory for `count` branches; it is reserved for one."""
        return self._admission.fits_branches(request, count, width, self._requests.admitted)
