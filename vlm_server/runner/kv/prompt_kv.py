"""A prompt and its KV cache: what a prefill fills, and sequences start from."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

from vlm_server.cache.prompt_key import PromptKey
from vlm_server.interfaces import NewRequest
from vlm_server.runner.kv.segments import LayerStates, SequenceState


class PrefixEntry(NamedTuple):
    """An entry for the prefix cache: tokens, the state after them, and the cache salt."""

    key: PromptKey
    state: SequenceState
    salt: str


class PromptKV:
    """A request's prompt, and the KV cache that holds it once it is prefilled."""

    def __init__(self, request: NewRequest, cache: list[Any], row: int | None = None) -> None:
        """row: the prompt's row in the cache of a batched prefill; None if the cache is its own."""
        self.prompt = request.prompt
        self.sampling = request.sampling
        self.cache = cache
        self.snapshots: dict[int, LayerStates] = {}
        """States of layers that can't be cut, by the number of tokens before them."""
        self.hidden: mx.array | None = None
        """The hidden state of the last token, (1, 1, hidden), for a draft head."""
        self._row = row

    def entry(self, num_tokens: int | None = None, *, is_unused: bool) -> PrefixEntry:
        """The prefix cache's entry of the prompt, or of its first `num_tokens`.

        is_unused: whether no sequence runs on the cache any more.
        """
        key = self.prompt.key if num_tokens is None else self.prompt.key.part(0, num_tokens)
        state = SequenceState(
            self.cache,
            self.snapshots,
            self._row or 0,
            is_unused=is_unused and self._row is None,
        )
        return PrefixEntry(key, state, self.prompt.prefix_salt)
