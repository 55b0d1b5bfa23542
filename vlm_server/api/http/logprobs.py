"""Log probabilities as JSON can have them."""

from __future__ import annotations

import math

IMPOSSIBLE = -9999.0
"""OpenAI's value for minus infinity, which JSON does not have."""


def finite(logprob: float) -> float:
    """`logprob`, or `IMPOSSIBLE` if it is infinite or NaN."""
    return logprob if math.isfinite(logprob) else IMPOSSIBLE
