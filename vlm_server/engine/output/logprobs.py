"""The log probabilities of a token, as text."""

from __future__ import annotations

import re

from vlm_server.engine.output.detokenizer import Decoder
from vlm_server.interfaces import TokenLogprobs
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
    text = decoder.decode([token_id], skip_special_tokens=False)
    is_whole = _REPLACEMENT not in text
    return TokenText(text, logprob, b"" if is_whole else _bytes(decoder.id_to_token(token_id)))


def _bytes(token: str | None) -> bytes:
    """Those of a token as a vocabulary writes it, byte by byte; empty if it does not.

    Vocabularies have a character for each byte (GPT-2's), or tokens of one byte (SentencePiece's).
    """
    if token is None:
        return b""
    if found := _ONE_BYTE.fullmatch(token):
        return bytes.fromhex(found[1])
    return bytes(_BYTE_OF[each] for each in token) if _BYTE_OF.keys() >= set(token) else b""


_REPLACEMENT = "\ufffd"
_ONE_BYTE = re.compile("<0x([0-9A-F]{2})>")
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = sorted({*range(0x100)} - {*_PRINTABLE})
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)
}
