"""Gemma 4's assistant: a drafter that attends to the model's own KV and has none.

It begins with the newest token and the model's hidden state before it. At each guess, it attends
to all tokens that the model has seen, from the place of the last of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from vlm_server.errors import ModelLoadError
from vlm_server.runner.backends.interface import Attention
from vlm_server.runner.drafters.draft_head import StepwiseHead
from vlm_server.runner.kv.batch_cache import RowsKVCache, SequenceLayer, bounds_of
from vlm_server.runner.kv.layers import new_layers
from vlm_server.runner.kv.packed_cache import columns_of


class AssistantHead(StepwiseHead):
    """Its states are what it makes of the model's, beside what its own head reads."""

    def __init__(self, module: Any, language_model: Any, attention: Attention) -> None:
        super().__init__(module, language_model, attention)
        module.bind(language_model)
        num_layers = len(new_layers(language_model))
        names = [getattr(layer, "layer_type", "") for layer in language_model.layers[:num_layers]]
        self._places = {name: place for place, name in enumerate(names)}
        """The number of the model's layer of each type whose KV it attends to: the last one."""
        if missing := {layer.layer_type for layer in module.model.layers} - self._places.keys():
            raise ModelLoadError(f"the drafter needs layers that the model lacks: {missing}")
        if (ordered := module.masked_embedding) is not None:
            token_ids = ordered.token_ordering
            if token_ids.min().item() < 0 or token_ids.max().item() >= self.sizes(module)[1]:
                raise ModelLoadError("the drafter orders tokens that are none")
        self._try(language_model)

    @staticmethod
    def sizes(module: Any) -> tuple[int, int]:
        return module.config.backbone_hidden_size, module.config.text_config.vocab_size

    @staticmethod
    def append_lazily(
        module: Any, language_model: Any, token_ids: mx.array, layers: list[Any]
    ) -> None:
        """It has none."""

    def layers_of(self, layers: list[Any]) -> list[Any]:
        return [layers[place] for place in self._places.values()]

    def guess(self, hidden: mx.array) -> mx.array:
        states = hidden[..., self._size :]
        if self.module.masked_embedding is not None:
            return self._guess_in_groups(states)
        return mx.argmax(self.module._lm_head_fn(states), axis=-1)

    def _guess_in_groups(self, states: mx.array) -> mx.array:
        """The likeliest tokens of the likeliest groups, by rows of embeddings of any kind."""
        ordered, count = self.module.masked_embedding, self.module.masked_embedding.top_k
        groups = mx.argpartition(ordered.centroids(states), -count, axis=-1)[..., -count:]
        tokens = ordered.token_ordering.reshape(ordered.num_centroids, -1)[groups]
        tokens = tokens.reshape(*states.shape[:-1], -1)
        embeddings = self.module.model.embed_tokens(tokens)
        scores = (embeddings @ states[..., None]).squeeze(-1)
        return mx.take_along_axis(tokens, mx.argmax(scores, axis=-1, keepdims=True), -1)[..., 0]

    def _try(self, language_model: Any) -> None:
        """Guess once, lazily. Raises any exception if the model's KV does not fit."""
        layers, token_ids = new_layers(language_model), mx.zeros((1, 1), mx.int32)
        language_model(token_ids, cache=layers)
        hidden = mx.zeros((1, 1, self._size))
        self.guess(self.append_text(token_ids, hidden, self.layers_of(layers), [0]))

    @property
    def _size(self) -> int:
        """That of the model's hidden states."""
        return self.sizes(self.module)[0]

    def _text_inputs(self, token_ids: mx.array, positions: Sequence[int]) -> dict[str, Any]:
        return {}

    def _append(
        self, token_ids: mx.array, inputs: dict[str, Any], hidden: mx.array, layers: Sequence[Any]
    ) -> mx.array:
        module = self.module
        embeddings = module._input_embed(token_ids) * module._input_embed_scale
        states = mx.concatenate([embeddings, hidden[..., : self._size]], axis=-1)
        states = module.pre_projection(states)
        seen = dict(zip(self._places, map(_seen_kv, layers), strict=True))
        for layer in module.model.layers:
            keys, values, mask, places = seen[layer.layer_type]
            states, _, _ = layer(states, mask=mask, shared_kv=(keys, values), offset=places)
        states = module.model.norm(states)
        return mx.concatenate([module.post_projection(states), states], axis=-1)


class _SeenKV(NamedTuple):
    """What a next token would attend to in a layer of the model.

    keys, values: (rows, heads, columns, head size). mask: (rows, 1, 1, columns) bool, None if all
    are seen. places: (rows,) int32, each row's number of tokens less one.
    """

    keys: mx.array
    values: mx.array
    mask: mx.array | None
    places: mx.array


def _seen_kv(layer: SequenceLayer | RowsKVCache) -> _SeenKV:
    bounds, window = bounds_of(layer), getattr(layer, "max_size", None)
    starts = [max(start, 0 if window is None else end - window + 1) for start, end in bounds]
    first, last = max(min(starts), 0), max(end for _, end in bounds)
    sides = columns_of(layer, slice(None), slice(first, last))
    ends = [end for _, end in bounds]
    mask = None
    if max(starts) > first or min(ends) < last:
        columns = mx.arange(first, last)
        mask = (columns >= mx.array(starts)[:, None]) & (columns < mx.array(ends)[:, None])
        mask = mask[:, None, None]
    return _SeenKV(*sides, mask, mx.array([end - start - 1 for start, end in bounds]))
