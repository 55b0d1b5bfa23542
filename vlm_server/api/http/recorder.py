"""Measurements of one answer."""

from __future__ import annotations

import time
from asyncio import CancelledError
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Self

from vlm_server.api.http.model_metrics import ModelMetrics
from vlm_server.protocol import Delta, Finished, FinishReason, Timeline, Usage

_NOTHING = Timeline()
_ON_DEVICE = ("disk_read", "encode", "prefill", "decode")


class AnswerRecorder:
    """Measures one answer, as a context from the submission to the engine to the answer's end.

    Times are monotonic seconds. A delta counts as delivered once its bytes were passed to the
    operating system; in a whole answer, once the front has it.
    """

    def __init__(
        self,
        metrics: ModelMetrics,
        model: str,
        response_id: str,
        received_at: float,
        *,
        is_stream: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """received_at: the time at which all headers had arrived."""
        self.model = model
        self.response_id = response_id
        self.is_stream = is_stream
        self.received_at = received_at
        self.submitted_at = clock()
        self.first_at: float | None = None
        """The time of the first delta delivered."""
        self.ended_at = 0.0
        self.usage = Usage(0, 0)
        self.timeline = _NOTHING
        self.finish_reasons: dict[int, FinishReason] = {}
        """Finish reasons by choice."""
        self.reason = ""
        """The end of the request: one of `model_metrics.REASONS`."""
        self.longest_silence_seconds: float | None = None
        self._image_tokens: int | None = None
        self._metrics = metrics
        self._clock = clock
        self.has_begun = False
        """Whether the device has begun with the request."""
        self._given_at: dict[int, float] = {}
        self._last_given_at = 0.0

    def __enter__(self) -> Self:
        self._metrics.num_waiting += 1
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        self.ended_at = self._clock()
        if isinstance(error, CancelledError):
            self.reason = "abort"
        elif error is not None:
            self.reason = "error"
        if self.has_begun:
            self._metrics.num_running -= 1
        else:
            self._metrics.num_waiting -= 1
        self._metrics.ended[self.reason] += 1
        if self.reason in ("abort", "error"):
            self._count_lost()
        else:
            self._count_answered()
        if self.longest_silence_seconds is not None and self.is_stream:
            self._metrics.longest_silence.observe(self.longest_silence_seconds)

    # ---- events ----------------------------------------------------------------------

    def begin(self) -> None:
        """Note that the device begins with the request; later calls do nothing."""
        if not self.has_begun:
            self.has_begun = True
            self._metrics.num_waiting -= 1
            self._metrics.num_running += 1

    def record_deltas(self, deltas: Collection[Delta]) -> None:
        """Record delivered `deltas`; those without text or a tool call are not counted."""
        now = self._clock()
        for delta in deltas:
            if not (delta.text or delta.tool_call):
                continue
            if self.first_at is None:
                self.first_at = now
                self._metrics.time_to_first_token.observe(now - self.received_at)
            else:
                self._record_silence(now)
            previous_at = self._given_at.get(delta.choice)
            if previous_at is not None:
                self._metrics.inter_token_latency.observe(now - previous_at)
            self._given_at[delta.choice] = self._last_given_at = now

    def finish(self, finished: Finished) -> None:
        """Record the engine's complete answer, before its end is sent."""
        self.usage, self.timeline = finished.usage, finished.timeline
        if finished.images or finished.documents:
            image_tokens = sum(image.tokens for image in finished.images)
            page_tokens = sum(document.tokens for document in finished.documents)
            self._image_tokens = image_tokens + page_tokens
        reasons = self.finish_reasons.values()
        self.reason = next((end for end in ("length", "tool_calls") if end in reasons), "stop")

    # ---- results --------------------------------------------------------------------

    @property
    def spans(self) -> list[tuple[str, float, float]]:
        """(phase, start, end) of each phase so far; `receive` ends where the engine begins."""
        spans = [("receive", self.received_at, self.submitted_at)]
        start, end = self.submitted_at, max(self.submitted_at, self.timeline.began_at)
        for phase in self.timeline.phases:
            end += phase.seconds
            spans.append((phase.name, start, end))
            start = end
        return spans

    def phase_seconds(self) -> dict[str, float]:
        """Seconds by phase; a repeated phase is summed."""
        seconds = dict.fromkeys(("receive", "queue", "prepare", "encode", "prefill", "decode"), 0.0)
        for name, start, end in self.spans:
            seconds[name] = seconds.get(name, 0.0) + end - start
        return seconds

    def server_timing(self, now: float) -> str:
        """The `Server-Timing` header (https://www.w3.org/TR/server-timing/), in milliseconds."""
        seconds = {**self.phase_seconds(), "total": now - self.received_at}
        return ", ".join(f"{name};dur={1e3 * value:.1f}" for name, value in seconds.items())

    def set_exemplars(self, trace_id: str) -> None:
        """Name the trace of the finished request in the histograms that count it."""
        if self.first_at is not None:
            seconds = self.first_at - self.received_at
            self._metrics.time_to_first_token.set_exemplar(seconds, trace_id)
        if self.reason not in ("abort", "error"):
            self._metrics.latency.set_exemplar(self.ended_at - self.received_at, trace_id)

    def _count_answered(self) -> None:
        metrics, seconds = self._metrics, self.phase_seconds()
        metrics.latency.observe(self.ended_at - self.received_at)
        metrics.prompt_tokens.observe(self.usage.prompt_tokens)
        metrics.generation_tokens.observe(self.usage.completion_tokens)
        if self._image_tokens is not None:
            metrics.image_tokens.observe(self._image_tokens)
        metrics.inference.observe(sum(seconds.get(name, 0.0) for name in _ON_DEVICE))
        for name, histogram in metrics.phases.items():
            if name != "encode" or seconds[name]:
                histogram.observe(seconds[name])

    def _count_lost(self) -> None:
        """Count the wait of a request without an answer: an overload must not look short."""
        if not self.has_begun:
            self._metrics.phases["queue"].observe(self.ended_at - self.submitted_at)
        if self.first_at is not None:
            self._record_silence(self.ended_at)

    def _record_silence(self, until: float) -> None:
        silence = until - self._last_given_at
        self.longest_silence_seconds = max(self.longest_silence_seconds or 0.0, silence)
