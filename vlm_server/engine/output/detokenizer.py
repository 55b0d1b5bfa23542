"""Token ids to text, token by token, and the text of their log probabilities."""

from __future__ import annotations

import re

from tokenizers import Tokenizer

from vlm_server.interfaces import TokenLogprobs
from vlm_server.protocol import TokenLogprob, TokenText

_REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 8
"""A character has at most 4 bytes: bytes still unreadable after this many tokens never will be."""


class Detokenizer:
    """Turns one answer's token ids into text that never splits a character.

    Decodes a short window, and emits what the newest tokens add to what the window already
    gave (the method of vLLM's and text-generation-inference's incremental detokenizers).
    The emitted texts, joined, equal the text of all ids decoded in one call. Control tokens, which
    are the tokenizer's special ones, have text only `with_control`.
    """

    def __init__(self, decoder: Tokenizer, *, with_control: bool = False) -> None:
        self.num_control = 0
        """The length of the control token at the end of the text emitted last; 0 without one."""
        self._decoder = decoder
        self._with_control = with_control
        self._ids: list[int] = []
        self._num_emitted = 0

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is incomplete.

        Ids unknown to the tokenizer have no text: logits are often wider than its vocabulary.
        """
        self.num_control = 0
        if self._decoder.id_to_token(token_id) is None:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if not text.endswith(_REPLACEMENT):
            text = self._emit(len(self._ids), text)
            if self._with_control and text:
                self.num_control = self._num_control_in(text, token_id)
            return text
        if len(self._ids) - self._num_emitted <= _MAX_HELD_TOKENS:
            return ""
        end = self._last_border(text)
        return self._emit(end, self._decode(self._ids[:end]))

    def flush(self) -> str:
        """The text that was held back, unreadable bytes as U+FFFD."""
        self.num_control = 0
        return self._emit(len(self._ids), self._decode(self._ids))

    def _emit(self, end: int, decoded_text: str) -> str:
        """The text that the ids up to `end`, decoded as `decoded_text`, add to the emitted text.

        The window then begins with these ids.
        """
        emitted_text = self._decode(self._ids[: self._num_emitted])
        if len(decoded_text) <= len(emitted_text):
            if self._ids and self._is_control(self._ids[-1]):
                self._ids.pop()  # it has no text, and does not wait for more ids
            return ""
        del self._ids[: self._num_emitted]
        self._num_emitted = end - self._num_emitted
        return decoded_text[len(emitted_text) :]

    def _last_border(self, text: str) -> int:
        """The last index at which the ids of `text` can be split without splitting a character."""
        for end in range(len(self._ids) - 1, self._num_emitted, -1):
            if self._decode(self._ids[:end]) + self._decode(self._ids[end:]) == text:
                return end
        return len(self._ids)

    def _num_control_in(self, text: str, token_id: int) -> int:
        """Characters of a control token at the end of `text`, which `token_id` completed."""
        if not self._is_control(token_id):
            return 0
        control = self._decoder.decode([token_id], skip_special_tokens=False)
        return len(control) if text.endswith(control) else 0

    def _is_control(self, token_id: int) -> bool:
        decode = self._decoder.decode
        return not decode([token_id]) and bool(decode([token_id], skip_special_tokens=False))

    def _decode(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=not self._with_control)


def decode_logprobs(
    decoder: Tokenizer, token_id: int, token_logprobs: TokenLogprobs | None
) -> tuple[TokenLogprob, ...]:
    """Log probabilities of `token_id` and the likeliest tokens in its place, with their texts.

    Empty if not requested.
    """
    if token_logprobs is None:
        return ()
    token = _text(decoder, token_id, token_logprobs.logprob)
    return (TokenLogprob(token, tuple(_text(decoder, *top) for top in token_logprobs.top)),)


def _text(decoder: Tokenizer, token_id: int, logprob: float) -> TokenText:
    text = decoder.decode([token_id], skip_special_tokens=False)
    is_whole = _REPLACEMENT not in text
    return TokenText(text, logprob, b"" if is_whole else _bytes(decoder.id_to_token(token_id)))


def _bytes(token: str | None) -> bytes:
    """The bytes of a token in a byte-level vocabulary; empty for other tokens.

    Vocabularies have a character for each byte (GPT-2's), or tokens of one byte (SentencePiece's).
    """
    if token is None:
        return b""
    if match := _ONE_BYTE.fullmatch(token):
        return bytes.fromhex(match[1])
    return bytes(_BYTE_OF[char] for char in token) if _BYTE_OF.keys() >= set(token) else b""


_ONE_BYTE = re.compile("<0x([0-9A-F]{2})>")
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = sorted({*range(0x100)} - {*_PRINTABLE})
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)
}
