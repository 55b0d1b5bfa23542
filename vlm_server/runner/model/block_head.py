"""A drafter that guesses a block of tokens at once: DFlash, and those made after it.

Its layers have the keys and values of the model's hidden states. In a block, the newest token and
masks for those to be guessed attend to them and to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from vlm_server.errors import ModelLoadError
from vlm_server.runner.backends.interface import Attention
from vlm_server.runner.kv.batch_cache import RowsKVCache, SequenceLayer, bounds_of
from vlm_server.runner.kv.layers import storage_of
from vlm_server.runner.model.draft_head import DraftHead
from vlm_server.runner.model.hidden_states import keep_inputs
from vlm_server.runner.model.lm_head import WantedLogits, logits_of


class BlockHead(DraftHead):
    """Column i is of the hidden state before token i, like that of other heads.

    It counts positions by its columns. All columns are kept, whatever its window.
    """

    def __init__(self, module: Any, language_model: Any, attention: Attention) -> None:
        super().__init__(module, language_model, attention)
        keep_inputs(language_model, [number + 1 for number in module.config.target_layer_ids])
        try:
            module.bind(language_model)
        except (AttributeError, ValueError) as error:
            raise ModelLoadError(f"the drafter does not fit the model: {error}") from error
        module._project_context_kv = lambda _: None  # else it copies the weights of all layers

    @staticmethod
    def sizes(module: Any) -> tuple[int, int]:
        return module.config.hidden_size, module.config.vocab_size

    @staticmethod
    def append_lazily(
        module: Any, language_model: Any, token_ids: mx.array, layers: list[Any]
    ) -> None:
        size = len(module.config.target_layer_ids) * module.config.hidden_size
        _append_states(module, mx.zeros((*token_ids.shape, size)), layers)

    def draft_block(
        self, newest: Sequence[int], hidden: mx.array, layers: Sequence[Any], count: int
    ) -> mx.array:
        """The likeliest `count` tokens after the `newest` of each row, or fewer: (rows, tokens).

        hidden: the states before the newest, which `layers` lack, (rows, 1, hidden).
        """
        count = min(count, self.module.config.block_size - 1)
        with logits_of(self._language_model, WantedLogits(count)):
            rows = [
                self._draft_row(token, hidden[row : row + 1], layers, row, count)
                for row, token in enumerate(newest)
            ]
        return mx.concatenate(rows)

    def _draft_row(
        self, newest: int, hidden: mx.array, layers: Sequence[Any], row: int, count: int
    ) -> mx.array:
        seen = [
            _SeenLayer(layer, row, self._window(module.self_attn))
            for module, layer in zip(self.module.layers, layers, strict=True)
        ]
        tokens: mx.array = self.module.draft_block(newest, hidden, seen, count + 1, _likeliest)
        return tokens

    def _window(self, attention: Any) -> int | None:
        """The number of hidden states that a layer attends to; None for all."""
        window: int | None = self.module.config.draft_window_size
        if window is None and attention.is_sliding:
            return int(attention.sliding_window) - 1
        return window or None

    def _text_inputs(self, token_ids: mx.array, positions: Sequence[int]) -> dict[str, Any]:
        return {}

    def _append(
        self, token_ids: mx.array, inputs: dict[str, Any], hidden: mx.array, layers: Sequence[Any]
    ) -> mx.array:
        _append_states(self.module, hidden, layers)
        return hidden


def _append_states(module: Any, hidden: mx.array, layers: Sequence[Any]) -> None:
    """Append the keys and values of `hidden`, (rows, tokens, hidden), to the layers."""
    states = module.hidden_norm(module.fc(hidden))
    rows, count, _ = states.shape
    for layer, cache in zip(module.layers, layers, strict=True):
        attention = layer.self_attn
        shape = rows, count, attention.n_kv_heads, attention.head_dim
        keys, values = (side.reshape(shape) for side in attention._project_kv(states))
        keys = attention.k_norm(keys).transpose(0, 2, 1, 3)
        keys = module.rope(keys, offset=cache.offset - 1)
        cache.update_and_fetch(keys, values.transpose(0, 2, 1, 3))


class _SeenLayer:
    """A row of a layer as mlx-vlm's drafters take it; nothing is appended to it."""

    def __init__(self, layer: SequenceLayer | RowsKVCache, row: int, window: int | None) -> None:
        """`window`: the number of columns that are seen, with the one that is fetched."""
        start, end = bounds_of(layer)[row]
        self.offset = end - start - 1
        """The position of the hidden state that is fetched."""
        first = start + 1  # the first column has no hidden state
        if window is not None:
            first = max(first, end - window + 1)
        sides = (side[row : row + 1, :, first:end] for side in (layer.keys, layer.values))
        storage = storage_of(layer)
        self._sides = sides if storage.is_exact else layer.plain.unpack(tuple(sides), storage)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Those seen, and (1, heads, 1, head size) after them."""
        seen_keys, seen_values = self._sides
        return mx.concatenate([seen_keys, keys], 2), mx.concatenate([seen_values, values], 2)


def _likeliest(logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1)
