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
from vlm_server.runner.model.chunks import PromptChunk, StepOutput
from vlm_server.runner.model.lm_head import WantedLogits, logits_of

_CAPTURE = "capture_layer_ids"


class TextModel:
    """One language model, run by mlx-vlm's code without compilation."""

    max_inner_points = 0
    """See `Backend.max_inner_points`; 0 for a model without states, or without compiled steps."""

    def __init__(
        self, language_model: Any, attention: ModelAttention, *, keeps_hidden: bool = False
    ) -> None:
        """keeps_hidden: whether steps return hidden states, for a draft head."""
        self.keeps_hidden = keeps_hidden
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
    ) -> tuple[StepOutput, StepOutput | None]:
        """Append `token_ids`, (rows, tokens), to `cache`, and, if possible, `chunk` to its prompt.

        inputs: further arguments of the model, and `ADAPTERS`. Returns the output for the rows, and
        that for the chunk, whose logits are of its last token; None if it is not part of the step.
        """
        count, layers, arguments = token_ids.shape[1], cache, dict[str, Any](inputs)
        if count > 1:
            arguments |= self._wide_arguments
            layers = [
                RowsKVCache.take_over(layer) if isinstance(layer, SequenceLayer) else layer
                for layer in cache
            ]
        logits = logits_of(self._language_model, WantedLogits(count))
        with logits as seen, self._attention.in_place(), applied(arguments) as others:
            output = self._language_model(token_ids, cache=layers, **others)
        for layer, layer_cache in zip(layers, cache, strict=True):
            if layer is not layer_cache:
                layer.give_back(layer_cache)
        hidden = seen.all if self.keeps_hidden else None
        return StepOutput(output.logits[:, -count:], hidden), None

    def step_once(
        self, token_ids: mx.array, cache: list[Any], inputs: dict[str, mx.array]
    ) -> mx.array:
        """The logits of `step`, never compiled: for shapes that hardly come again."""
        forget_columns(cache)
        return TextModel.step(self, token_ids, cache, inputs)[0].logits

    def prefill(self, chunk: PromptChunk) -> StepOutput | None:
        """Prefill `chunk` in a step of its own.

        Returns the output, whose logits are of its last token; None if there is no compiled step
        for it, and nothing was done.
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
