"""A trained drafter: a head that guesses tokens from the hidden states of the model.

Multi-token prediction (MTP; DeepSeek-V3, Qwen3.5): from the embedding of a token and the hidden
state of the token before it, a small layer computes a hidden state. The model's own head turns that
into logits of the next token, and the layer itself, with the guess's embedding, into one more.

Its KV has a column for each token, in layers after the model's own. So batches, the prefix cache
and estimates of memory treat them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import KVCache

from vlm_server.runner.backends.interface import Attention
from vlm_server.runner.model.attention import ModelAttention
from vlm_server.runner.model.lm_head import embed, likeliest
from vlm_server.runner.model.mrope import next_position_ids, use_shared_mrope


def append_lazily(module: Any, embeddings: mx.array) -> list[Any]:
    """The layers of a head after these tokens, (1, tokens, hidden), none of it computed."""
    layers = [KVCache() for _ in module.layers]
    count = embeddings.shape[1]
    position_ids = mx.broadcast_to(mx.arange(count), (3, 1, count))
    module._forward_hidden(embeddings, mx.zeros_like(embeddings), layers, position_ids)
    return layers


class DraftHead:
    """mlx-vlm's module of a head, with the embeddings and the head of one language model."""

    def __init__(self, module: Any, language_model: Any, attention: Attention) -> None:
        self.module = module
        self._language_model = language_model
        self._attention = ModelAttention(module, attention)
        self._positions = use_shared_mrope(module)

    @property
    def name(self) -> str:
        """mlx-vlm's name of its kind, such as `qwen3_5_mtp`."""
        return str(self.module.config.model_type)

    @property
    def num_layers(self) -> int:
        return len(self.module.layers)

    def new_layers(self) -> list[Any]:
        """An empty cache for each of its layers, of one sequence."""
        return [KVCache() for _ in range(self.num_layers)]

    def append(
        self,
        embeddings: mx.array,
        hidden: mx.array,
        layers: Sequence[Any],
        position_ids: mx.array,
    ) -> mx.array:
        """Append tokens to `layers`; returns the hidden states for the tokens after them, lazy.

        embeddings: of the tokens; hidden: the states before each; both (rows, tokens, hidden), as
        is the result. position_ids: (3, rows, tokens), or (rows, 1) of text.
        """
        with self._attention.in_place():
            states: mx.array = self.module._forward_hidden(
                embeddings, hidden, list(layers), position_ids
            )
        return states

    def append_text(
        self,
        token_ids: mx.array,
        hidden: mx.array,
        layers: Sequence[Any],
        positions: Sequence[int],
    ) -> mx.array:
        """`append` for `token_ids`, (rows, tokens), given the first position of each row."""
        embeddings = embed(self._language_model, token_ids)
        ids = next_position_ids(self._positions, positions, token_ids.shape[1])
        return self.append(embeddings, hidden, layers, ids["position_ids"])

    def guess(self, hidden: mx.array) -> mx.array:
        """The likeliest tokens, (rows, 1), by hidden states that it returned, (rows, 1, hidden)."""
        return likeliest(self._language_model, hidden)

    def append_chunk(
        self,
        embeddings: mx.array,
        hidden: mx.array,
        before: mx.array | None,
        layers: Sequence[Any],
        position_ids: mx.array | None,
    ) -> None:
        """Append tokens of prompts whose own hidden states are `hidden`, (rows, tokens, hidden).

        before: the state before the first of them, (rows, 1, hidden). None at the start of a
        prompt, or after a cached prefix, with which it is not stored: zeros take its place.
        position_ids: None for an order without pictures.
        """
        rows, count, _ = hidden.shape
        if before is None:
            before = mx.zeros_like(hidden[:, :1])
        if position_ids is None:
            start = layers[0].offset
            position_ids = mx.broadcast_to(mx.arange(start, start + count), (3, rows, count))
        states = mx.concatenate([before, hidden[:, :-1]], axis=1)
        self.append(embeddings, states, layers, position_ids)
