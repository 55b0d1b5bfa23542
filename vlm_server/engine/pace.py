"""How much prompt fits into a step's time. Knows measured seconds; knows no requests."""

from __future__ import annotations

_WEIGHT = 0.3
"""Of the newest measurement in the running mean: a new load is followed within a few steps."""
_GRAIN_TOKENS = 16


class PrefillPace:
    """Sizes prefill chunks so that the rows that decode wait no longer than a step may take."""

    def __init__(self, max_step_seconds: float, max_chunk_tokens: int) -> None:
        self._max_step_seconds = max_step_seconds
        self._max_chunk_tokens = max_chunk_tokens
        self._seconds_per_token: float | None = None

    def note(self, num_tokens: int, seconds: float) -> None:
        """A chunk of `num_tokens` took `seconds`."""
        measured = seconds / num_tokens
        mean = self._seconds_per_token
        self._seconds_per_token = measured if mean is None else mean + _WEIGHT * (measured - mean)

    def chunk_tokens(self, *, others_wait: bool) -> int:
        """Tokens of the next chunk; the largest allowed while nobody waits for its end."""
        if not others_wait or not self._seconds_per_token:
            return self._max_chunk_tokens
        fitting = int(self._max_step_seconds / self._seconds_per_token)
        whole_grains = fitting // _GRAIN_TOKENS * _GRAIN_TOKENS
        return min(max(whole_grains, _GRAIN_TOKENS), self._max_chunk_tokens)
