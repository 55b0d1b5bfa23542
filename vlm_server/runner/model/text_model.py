"""Runs a language model: decode steps of several rows, and prefill chunks of one prompt.

By compiled graphs where that pays and is possible, else as mlx-vlm runs it.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import KVCache

from vlm_server.runner.backends.bounded_layer import forget_columns
from vlm_server.runner.kv.batch_cache import RowsKVCache
from vlm_server.runner.model.attention import ModelAttention
from vlm_server.runner.model.compiled_model import CompiledModel
from vlm_server.runner.model.lm_head import logits_of_last
from vlm_server.runner.model.prompt_chunk import PromptChunk


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

    def most_beside(self, rows: int, *, has_media: bool) -> int:
        """How many tokens of a prompt a step of so many rows may read; 0 for none."""
        compiled = self._compiled
        return 0 if compiled is None else compiled.most_beside(rows, has_media=has_media)

    def step(
        self,
        token_ids: mx.array,
        cache: list[Any],
        position_ids: dict[str, mx.array],
        beside: PromptChunk | None = None,
    ) -> mx.array:
        """Append `token_ids`, (rows, tokens), to the layers of `cache`.

        Returns logits, (rows, tokens, vocabulary), lazy. `beside` is read in the same pass if that
        is possible: it has logits then.
        """
        if self._compiled is not None and self._compiled.takes(cache):
            logits = self._compiled.step(token_ids, cache, position_ids, beside)
            if logits is not None:
                return logits
        return self._eager(token_ids, cache, position_ids)

    def prefill(self, chunk: PromptChunk) -> mx.array | None:
        """Read `chunk` by itself.

        Returns the logits of its last token, (1, 1, vocabulary), lazy; None if there is no graph
        for it, and nothing was done.
        """
        compiled = self._compiled
        if compiled is None or not compiled.takes_chunk(chunk):
            return None
        return compiled.prefill(chunk)

    def compile_next(self) -> bool:
        """While nobody waits, build a further graph. False if none is left."""
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
