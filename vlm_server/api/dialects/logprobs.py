"""Log probabilities of tokens in answers, in OpenAI's form, which all dialects use."""

from __future__ import annotations

import math
from typing import Any

from vlm_server.protocol import TokenLogprob, TokenText

_IMPOSSIBLE = -9999.0
"""OpenAI's value for minus infinity, which JSON does not have."""


def finite(logprob: float) -> float:
    """`logprob`, or -9999 if it is infinite or NaN."""
    return logprob if math.isfinite(logprob) else _IMPOSSIBLE


def token_logprob(entry: TokenLogprob, *, empty_top: bool = True) -> dict[str, Any]:
    """The JSON of a sampled token. Without `empty_top` an empty `top_logprobs` is left out."""
    top = [_token(token) for token in entry.top]
    return _token(entry.token) | ({"top_logprobs": top} if top or empty_top else {})


def _token(token: TokenText) -> dict[str, Any]:
    """`bytes` is the token's text in UTF-8, or its part of a character."""
    return {"token": token.text, "logprob": finite(token.logprob), "bytes": list(token.utf8)}
