"""The log probabilities of a token, as text."""

from __future__ import annotations

from vlm_server.engine.request.detokenizer import Decoder
from vlm_server.ports import TokenLogprobs
from vlm_server.protocol import TokenLogprob, TokenText


def logprobs(
    decoder: Decoder, token_id: int, found: TokenLogprobs | None
) -> tuple[TokenLogprob, ...]:
    """Of `token_id` and of the most likely ones in its place; empty if nobody asked for them."""
    if found is None:
        return ()
    token = _text(decoder, token_id, found.logprob)
    return (TokenLogprob(token, tuple(_text(decoder, *top) for top in found.top)),)


def _text(decoder: Decoder, token_id: int, logprob: float) -> TokenText:
    return TokenText(decoder.decode([token_id], skip_special_tokens=False), logprob)
