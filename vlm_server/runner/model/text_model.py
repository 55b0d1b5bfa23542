"""Runs a language model: decode steps of several rows, and prefill chunks of one prompt."""

from __future__ import annotations

import inspect
from typing import Any

import mlx.core as mx

from vlm_server.runner.backends.bounded_layer import forget_columns
from vlm_server.runner.kv.batch_cache import RowsKVCache, SequenceLayer
from vlm_server.runner.kv.layers import has_states, new_layers
from vlm_server.runner.model.adapters import applied
from vlm_server.runner.model.attention import ModelAttention
from vlm_server.runner.model.chunks import PromptChunk
from vlm_server.runner.model.lm_head import WantedLogits, logits_of

_CAPTURE = "capture_layer_ids"


class TextModel:
    """One language model, run by mlx-vlm's code without compilation."""

    def __init__(self, language_model: Any, attention: ModelAttention) -> None:
        self._language_model = language_model
        self._attention = attention
        self._wide_arguments = _arguments_of_wide_steps(language_model)

    def max_piggybacked_tokens(self, rows: int) -> int:
        """The maximum tokens of a prompt in a mixed step of `rows`; 0 for no mixed step."""
        return 0

    def step(
        self,
        token_ids: mx.array,
        cache: list[Any],
        inputs: dict[str, mx.array],
        chunk: PromptChunk | None = None,
    ) -> tuple[mx.array, mx.array | None]:
        """Append `token_ids`, (rows, tokens), to `cache`, and, if possible, `chunk` to its prompt.

        inputs: further arguments of the model, and `ADAPTERS`. Returns logits, (rows, tokens,
        vocabulary), lazy, and those of the chunk's last token, (1, 1, vocabulary); None if the
        chunk is not part of it.
        """
        count, layers, arguments = token_ids.shape[1], cache, dict[str, Any](inputs)
        if count > 1:
            arguments |= self._wide_arguments
            layers = [
                RowsKVCache.take_over(layer) if isinstance(layer, SequenceLayer) else layer
                for layer in cache
            ]
        logits = logits_of(self._language_model, WantedLogits(count))
        with logits, self._attention.in_place(), applied(arguments) as others:
            output = self._language_model(token_ids, cache=layers, **others)
        for layer, layer_cache in zip(layers, cache, strict=True):
            if layer is not layer_cache:
                layer.give_back(layer_cache)
        return output.logits[:, -count:], None

    def step_once(
        self, token_ids: mx.array, cache: list[Any], inputs: dict[str, mx.array]
    ) -> mx.array:
        """The logits of `step`, never compiled: for shapes that hardly come again."""
        forget_columns(cache)
        return TextModel.step(self, token_ids, cache, inputs)[0]

    def prefill(self, chunk: PromptChunk) -> mx.array | None:
        """Prefill `chunk` in a step of its own.

        Returns the logits of its last token, (1, 1, vocabulary), lazy; None if there is no compiled
        step for it, and nothing was done.
        """
        return None

    def precompile_next(self) -> bool:
        """Compile one more shape; False if none is left."""
        return False


def _arguments_of_wide_steps(language_model: Any) -> dict[str, Any]:
    """Further arguments of steps with several tokens of each row.

    Qwen3.5 takes such rows apart, and puts caches of its own in the place of ours, unless it is to
    capture hidden states, even if of no layer.
    """
    inner = getattr(language_model, "model", None)
    captures = _CAPTURE in inspect.signature(type(inner).__call__).parameters
    return {_CAPTURE: ()} if captures and has_states(new_layers(language_model)) else {}
