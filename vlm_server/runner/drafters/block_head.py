"""A drafter that guesses a block of tokens at once: DFlash, and those made after it.

Its layers have the keys and values of the model's hidden states. In a block, the newest token and
masks for those to be guessed attend to them and to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from vlm_server.cache.kv_storage import EXACT
from vlm_server.errors import ModelLoadError
from vlm_server.runner.backends.interface import Attention
from vlm_server.runner.drafters.draft_head import DraftHead
from vlm_server.runner.kv.batch_cache import RowsKVCache, SequenceLayer, bounds_of
from vlm_server.runner.kv.layers import empty_layer
from vlm_server.runner.kv.packed_cache import columns_of
from vlm_server.runner.model.hidden_states import keep_inputs
from vlm_server.runner.model.lm_head import WantedLogits, logits_of

_MIN_BLOCK = 2
"""The newest token, and one guess."""


class BlockHead(DraftHead):
    """Column i is of the hidden state before token i, like that of other heads.

    It counts positions by its columns. All columns are kept, whatever its window.
    """

    def __init__(self, module: Any, language_model: Any, attention: Attention) -> None:
        super().__init__(module, language_model, attention)
        config = module.config
        if not 0 <= config.mask_token_id < config.vocab_size:
            raise ModelLoadError(f"the drafter has no token {config.mask_token_id} for masks")
        if config.block_size < _MIN_BLOCK:
            raise ModelLoadError(f"the drafter guesses nothing: its blocks are {config.block_size}")
        module.validate_target_compatibility = lambda _: None  # it asks for methods not needed here
        module._project_context_kv = lambda _: None  # copies weights, and fails for Gemma 4's
        module.bind(language_model)
        self._try()
        keep_inputs(language_model, [number + 1 for number in config.target_layer_ids])

    def _try(self) -> None:
        """Draft once, lazily. Raises any exception if that is not possible."""
        layers = [empty_layer(None, EXACT) for _ in range(self.num_layers)]
        token_ids, config = mx.zeros((1, 2), mx.int32), self.module.config
        self.append_lazily(self.module, self._language_model, token_ids, layers)
        hidden = mx.zeros((1, 1, len(config.target_layer_ids) * config.hidden_size))
        for count in {1, config.block_size - 1}:
            with logits_of(self._language_model, WantedLogits(count)):
                self._draft_row(0, hidden, layers, 0, count)

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
        rows = []
        with logits_of(self._language_model, WantedLogits(count)):
            for row, token in enumerate(newest):
                rows.append(self._draft_row(token, hidden[row : row + 1], layers, row, count))
                mx.eval(rows[-1])  # each copies its layers' keys and values
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
        if (window := int(self.module.config.draft_window_size or 0)) > 0:
            return window
        return int(attention.sliding_window) - 1 if attention.is_sliding else None

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
        self._sides = columns_of(layer, slice(row, row + 1), slice(first, end))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Those seen, and (1, heads, 1, head size) after them."""
        seen_keys, seen_values = self._sides
        return mx.concatenate([seen_keys, keys], 2), mx.concatenate([seen_values, values], 2)


def _likeliest(logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1)
