"""Log probabilities of tokens in answers, as OpenAI writes them and all dialects that have them."""

from __future__ import annotations

import math

from msgspec import UNSET, Struct, UnsetType

from vlm_server import protocol

_IMPOSSIBLE = -9999.0
"""OpenAI's value for minus infinity, which JSON does not have."""


class TopLogprob(Struct, frozen=True):
    """`bytes` is `token` in UTF-8, or its part of a character."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


class TokenLogprob(TopLogprob, frozen=True):
    """The sampled token, and the likeliest tokens in its place."""

    top_logprobs: tuple[TopLogprob, ...] | UnsetType


def finite(logprob: float) -> float:
    """`logprob`, or -9999 if it is infinite or NaN."""
    return logprob if math.isfinite(logprob) else _IMPOSSIBLE


def token_logprob(entry: protocol.TokenLogprob, *, empty_top: bool = True) -> TokenLogprob:
    """`entry` as JSON. Without `empty_top` an empty `top_logprobs` is left out."""
    top = tuple(TopLogprob(*_shown(token)) for token in entry.top)
    return TokenLogprob(*_shown(entry.token), top if top or empty_top else UNSET)


def _shown(token: protocol.TokenText) -> tuple[str, float, tuple[int, ...]]:
    return token.text, finite(token.logprob), tuple(token.utf8)
