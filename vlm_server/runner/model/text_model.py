"""Runs a language model: decode steps of several rows, and prefill chunks of one prompt.

By compiled steps where that pays and is possible, else as mlx-vlm runs it.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import KVCache

from vlm_server.runner.backends.bounded_layer import forget_columns
from vlm_server.runner.kv.batch_cache import RowsKVCache
from vlm_server.runner.model.attention import ModelAttention
from vlm_server.runner.model.chunks import PromptChunk
from vlm_server.runner.model.compiled_model import CompiledModel
from vlm_server.runner.model.lm_head import logits_of_last


class TextModel:
    """One language model; `compiled` if its device gains by that."""

    def __init__(
        self,
        language_model: Any,
        attention: ModelAttention,
        compiled: CompiledModel | None = None,
    ) -> None:
        self._language_model = language_model
        self._attention = attention
        self._compiled = compiled

    def max_piggybacked_tokens(self, rows: int, *, has_media: bool) -> int:
        """The number of a prompt's tokens that fit into a mixed step of so many rows, or 0."""
        compiled = self._compiled
        return 0 if compiled is None else compiled.max_piggybacked_tokens(rows, has_media=has_media)

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
        if self._compiled is not None and self._compiled.takes(cache):
            made = self._compiled.step(token_ids, cache, position_ids, chunk)
            if made is not None:
                return made
        return self._eager(token_ids, cache, position_ids), None

    def prefill(self, chunk: PromptChunk) -> mx.array | None:
        """Read `chunk` by itself.

        Returns the logits of its last token, (1, 1, vocabulary), lazy; None if there is no compiled
        step for it, and nothing was done.
        """
        compiled = self._compiled
        if compiled is None or not compiled.takes_chunk(chunk):
            return None
        return compiled.prefill(chunk)

    def compile_next(self) -> bool:
        """Compile a further step, while nobody waits. False if none is left."""
        return self._compiled is not None and self._compiled.compile_next()

    def _eager(
        self, token_ids: mx.array, cache: list[Any], position_ids: dict[str, mx.array]
    ) -> mx.array:
        count, layers = token_ids.shape[1], cache
        if self._compiled is not None:
            forget_columns(cache)
        if count > 1:
            layers = [RowsKVCache.taking(each) if type(each) is KVCache else each for each in cache]
        with logits_of_last(self._language_model, count), self._attention.in_place():
            output = self._language_model(token_ids, cache=layers, **position_ids)
        for layer, each in zip(layers, cache, strict=True):
            if layer is not each:
                layer.give_back(each)
        logits: mx.array = output.logits[:, -count:]
        return logits
