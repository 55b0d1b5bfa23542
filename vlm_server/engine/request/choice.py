"""One of a request's answers while it is generated: its tokens, its text and its end."""

from __future__ import annotations

from vlm_server.engine.request.detokenizer import Decoder, Detokenizer
from vlm_server.engine.request.stops import StopChecker
from vlm_server.protocol import FinishReason, SamplingParams


class Choice:
    """One of a request's answers, token by token until it has a `finish_reason`."""

    def __init__(self, sampling: SamplingParams, decoder: Decoder) -> None:
        self.num_generated = 0
        self.finish_reason: FinishReason | None = None
        self._ignore_eos = sampling.ignore_eos
        self._detokenizer = Detokenizer(decoder)
        self._stops = StopChecker(sampling.stop)

    @property
    def stop(self) -> str | None:
        """The stop string that ended it."""
        return self._stops.reached

    def append_token(self, token_id: int, eos_token_ids: frozenset[int], max_tokens: int) -> str:
        """The text that a sampled token brings; may end the answer."""
        self.num_generated += 1
        if token_id in eos_token_ids and not self._ignore_eos:
            self.finish_reason = "stop"
            return self._last_text()[0]
        text, is_stopped = self._stops.push(self._detokenizer.push(token_id))
        is_last = self.num_generated >= max_tokens
        if is_last and not is_stopped:
            rest, is_stopped = self._last_text()
            text += rest
        if is_stopped or is_last:
            self.finish_reason = "stop" if is_stopped else "length"
        return text

    def _last_text(self) -> tuple[str, bool]:
        """(what was held back, whether a stop string was in it)."""
        text, is_stopped = self._stops.push(self._detokenizer.flush())
        return text + self._stops.flush(), is_stopped
