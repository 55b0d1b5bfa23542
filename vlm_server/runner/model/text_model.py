"""Runs a language model: decode steps of several rows, and prefill chunks of one prompt."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import KVCache

from vlm_server.runner.kv.batch_cache import RowsKVCache
from vlm_server.runner.model.attention import ModelAttention
from vlm_server.runner.model.chunks import PromptChunk
from vlm_server.runner.model.lm_head import WantedLogits, logits_of


class TextModel:
    """One language model, as mlx-vlm runs it; `CompiledModel` where the device gains by that."""

    def __init__(self, language_model: Any, attention: ModelAttention) -> None:
        self._language_model = language_model
        self._attention = attention

    def max_piggybacked_tokens(self, rows: int, *, has_media: bool) -> int:
        """The number of a prompt's tokens that fit into a mixed step of so many rows, or 0."""
        return 0

    def step(
        self,
        token_ids: mx.array,
        cache: list[Any],
        position_ids: dict[str, mx.array],
        chunk: PromptChunk | None = None,
    ) -> tuple[mx.array, mx.array | None]:
        """Append `token_ids`, (rows, tokens), to the layers of `cache`; with `chunk`, if possible.

        Returns logits, (rows, tokens, vocabulary), lazy, and those of the chunk's last token,
        (1, 1, vocabulary); None if the chunk was not read.
        """
        count, layers = token_ids.shape[1], cache
        if count > 1:
            layers = [RowsKVCache.taking(each) if type(each) is KVCache else each for each in cache]
        with logits_of(self._language_model, WantedLogits(count)), self._attention.in_place():
            output = self._language_model(token_ids, cache=layers, **position_ids)
        for layer, each in zip(layers, cache, strict=True):
            if layer is not each:
                layer.give_back(each)
        return output.logits[:, -count:], None

    def prefill(self, chunk: PromptChunk) -> mx.array | None:
        """Read `chunk` by itself.

        Returns the logits of its last token, (1, 1, vocabulary), lazy; None if there is no compiled
        step for it, and nothing was done.
        """
        return None

    def precompile_next(self) -> bool:
        """Compile one more shape; False if none is left."""
        return False
