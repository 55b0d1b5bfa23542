"""Log probabilities as JSON can have them."""

from __future__ import annotations

import math

IMPOSSIBLE = -9999.0
"""OpenAI's value for minus infinity, which JSON does not have."""


def finite(logprob: float) -> float:
    """`logprob` as a number."""
    return logprob if math.isfinite(logprob) else IMPOSSIBLE
