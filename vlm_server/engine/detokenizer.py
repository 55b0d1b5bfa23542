"""Token ids to text, piece by piece. Knows a tokenizer's `decode`; knows nothing of requests."""

from __future__ import annotations

from typing import Protocol

_REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 8
"""A character has at most 4 bytes: bytes still unreadable after this many tokens never will be."""


class Decoder(Protocol):
    """The part of `tokenizers.Tokenizer` that is used here."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """Turns one answer's token ids into text that never splits a character.

    Decodes a short window, and emits what the newest tokens add to what the window already
    gave (the method of vLLM's and text-generation-inference's incremental detokenizers).
    The pieces joined are the text of all ids decoded at once.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._ids: list[int] = []
        self._window_start = 0
        self._num_emitted = 0

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is incomplete."""
        self._ids.append(token_id)
        held = len(self._ids) - self._num_emitted
        return self._emit(allow_incomplete=held > _MAX_HELD_TOKENS)

    def flush(self) -> str:
        """What is still held back, unreadable bytes as U+FFFD."""
        return self._emit(allow_incomplete=True)

    def _emit(self, *, allow_incomplete: bool) -> str:
        before = self._decode(self._ids[self._window_start : self._num_emitted])
        after = self._decode(self._ids[self._window_start :])
        if after.endswith(_REPLACEMENT) and not allow_incomplete:
            return ""
        if len(after) <= len(before):
            return ""
        self._window_start = self._num_emitted
        self._num_emitted = len(self._ids)
        self._drop_read()
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=True)

    def _drop_read(self) -> None:
        del self._ids[: self._window_start]
        self._num_emitted -= self._window_start
        self._window_start = 0
