"""A trained drafter: a head that guesses tokens from the hidden states of the model.

From a token and the hidden state of the token before it, a small layer computes a state whose
logits are those of the next token, and from the guess and that state one more. `block_head` has
those that guess many tokens at once.

Most have KV with a column for each token, in layers after the model's own. So batches, the prefix
cache and estimates of memory treat them alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_vlm.models.base import create_attention_mask
from mlx_vlm.speculative.drafters.mtp_base import AutoregressiveMTPDraftModel

from vlm_server.runner.backends.interface import Attention
from vlm_server.runner.model.attention import ModelAttention
from vlm_server.runner.model.hidden_states import keep_inputs
from vlm_server.runner.model.lm_head import embed, likeliest
from vlm_server.runner.model.mrope import next_position_ids, use_shared_mrope


class DraftHead(ABC):
    """mlx-vlm's module of a head, for one language model."""

    def __init__(self, module: Any, language_model: Any, attention: Attention) -> None:
        self.module = module
        self._language_model = language_model
        self._attention = ModelAttention(module, attention)
        self.num_layers = len(module.make_cache())
        """The number of its layers that have KV; without any, it needs the newest states alone."""

    @property
    def name(self) -> str:
        """mlx-vlm's name of its kind, such as `qwen3_5_mtp`."""
        return kind_of(self.module)

    def layers_of(self, layers: list[Any]) -> list[Any]:
        """The part of `LoadedModel.new_layers` that it appends to or attends to."""
        return layers[len(layers) - self.num_layers :]

    def append_text(
        self,
        token_ids: mx.array,
        hidden: mx.array,
        layers: Sequence[Any],
        positions: Sequence[int],
    ) -> mx.array:
        """Append tokens to `layers`; returns the states for the tokens after them, lazy.

        token_ids: (rows, tokens). hidden: the states before each, (rows, tokens, hidden), of the
        model or of this head. positions: of each row's first token.
        """
        inputs = self._text_inputs(token_ids, positions)
        with self._attention.in_place():
            return self._append(token_ids, inputs, hidden, layers)

    def append_chunk(
        self,
        token_ids: mx.array,
        inputs: dict[str, Any],
        hidden: mx.array,
        before: mx.array | None,
        layers: Sequence[Any],
    ) -> None:
        """Append tokens of prompts whose own hidden states are `hidden`, (rows, tokens, hidden).

        inputs: those of the model's step. before: the state before the first of them, (rows, 1,
        hidden). None at the start of a prompt, or after a cached prefix, with which it is not
        stored: zeros take its place.
        """
        if not self.num_layers:
            return
        if before is None:
            before = mx.zeros_like(hidden[:, :1])
        states = mx.concatenate([before, hidden[:, :-1]], axis=1)
        with self._attention.in_place():
            self._append(token_ids, inputs, states, layers)

    @staticmethod
    @abstractmethod
    def sizes(module: Any) -> tuple[int, int]:
        """The sizes of hidden states and vocabulary of the model that the head is one of."""

    @staticmethod
    @abstractmethod
    def append_lazily(
        module: Any, language_model: Any, token_ids: mx.array, layers: list[Any]
    ) -> None:
        """Append tokens, (1, tokens), to its empty layers, in order to know their arrays."""

    @abstractmethod
    def _text_inputs(self, token_ids: mx.array, positions: Sequence[int]) -> dict[str, Any]:
        """What the head needs of the inputs of a model's step with these tokens."""

    @abstractmethod
    def _append(
        self, token_ids: mx.array, inputs: dict[str, Any], hidden: mx.array, layers: Sequence[Any]
    ) -> mx.array:
        """Append tokens to `layers`; returns the states for the tokens after them, lazy."""


class StepwiseHead(DraftHead):
    """A head that guesses one token after the other."""

    @abstractmethod
    def guess(self, hidden: mx.array) -> mx.array:
        """The likeliest tokens, (rows, 1), by states that it returned, (rows, 1, hidden)."""


class MtpHead(StepwiseHead):
    """Multi-token prediction (DeepSeek-V3), by the model's embeddings and `lm_head`."""

    def __init__(self, module: Any, language_model: Any, attention: Attention) -> None:
        super().__init__(module, language_model, attention)
        self._positions = use_shared_mrope(module)

    @staticmethod
    def sizes(module: Any) -> tuple[int, int]:
        return module.config.text_config.hidden_size, module.config.text_config.vocab_size

    @staticmethod
    def append_lazily(
        module: Any, language_model: Any, token_ids: mx.array, layers: list[Any]
    ) -> None:
        embeddings = embed(language_model, token_ids)
        hidden, positions = mx.zeros_like(embeddings), _in_order(token_ids, 0)
        _by_mtp(module, embeddings, hidden, layers, positions)

    def guess(self, hidden: mx.array) -> mx.array:
        return likeliest(self._language_model, hidden)

    def _text_inputs(self, token_ids: mx.array, positions: Sequence[int]) -> dict[str, Any]:
        ids = next_position_ids(self._positions, positions, token_ids.shape[1])
        return {"inputs_embeds": embed(self._language_model, token_ids), **ids}

    def _append(
        self, token_ids: mx.array, inputs: dict[str, Any], hidden: mx.array, layers: Sequence[Any]
    ) -> mx.array:
        position_ids = inputs.get("position_ids")
        if position_ids is None:
            position_ids = _in_order(token_ids, layers[0].offset)
        return _by_mtp(self.module, inputs["inputs_embeds"], hidden, layers, position_ids)


class EagleHead(StepwiseHead):
    """EAGLE-3 (Li et al. 2025): by the inputs of three of the model's layers.

    It has embeddings, a head and mostly a smaller vocabulary of its own, and counts positions by
    its columns.
    """

    def __init__(self, module: Any, language_model: Any, attention: Attention) -> None:
        super().__init__(module, language_model, attention)
        num_layers = len(language_model.layers)
        numbers = module.config.eagle_aux_hidden_state_layer_ids
        keep_inputs(language_model, numbers or (2, num_layers // 2, num_layers - 3))

    @staticmethod
    def sizes(module: Any) -> tuple[int, int]:
        return module.target_hidden_size, module.target_vocab_size

    @staticmethod
    def append_lazily(
        module: Any, language_model: Any, token_ids: mx.array, layers: list[Any]
    ) -> None:
        size = 3 * module.target_hidden_size
        _by_eagle(module, token_ids, mx.zeros((*token_ids.shape, size)), layers)

    def guess(self, hidden: mx.array) -> mx.array:
        ids = mx.argmax(self.module._logits(hidden), axis=-1)
        token_ids: mx.array = self.module._draft_to_target(ids, mx.int32)
        return token_ids

    def _text_inputs(self, token_ids: mx.array, positions: Sequence[int]) -> dict[str, Any]:
        return {}

    def _append(
        self, token_ids: mx.array, inputs: dict[str, Any], hidden: mx.array, layers: Sequence[Any]
    ) -> mx.array:
        return _by_eagle(self.module, token_ids, hidden, layers)


EAGLE = "eagle3"
"""mlx-vlm's name of the kind."""


def kind_of(module: Any) -> str:
    """mlx-vlm's name of the kind of a drafter's module: that of the package of its class."""
    return type(module).__module__.partition(".drafters.")[2].partition(".")[0]


def _by_mtp(
    module: Any,
    embeddings: mx.array,
    hidden: mx.array,
    layers: Sequence[Any],
    position_ids: mx.array,
) -> mx.array:
    states: mx.array
    if isinstance(module, AutoregressiveMTPDraftModel):  # its layers know no positions
        _, states = module._forward_hidden(embeddings, hidden, None, list(layers))
    else:
        states = module._forward_hidden(embeddings, hidden, list(layers), position_ids)
    return states


def _by_eagle(
    module: Any, token_ids: mx.array, hidden: mx.array, layers: Sequence[Any]
) -> mx.array:
    states: mx.array = module._prepare_target_hidden(hidden)
    embeddings = module.embed_tokens(token_ids)
    for number, (layer, cache) in enumerate(zip(module.layers, layers, strict=True)):
        mask = create_attention_mask(states, cache)
        inputs = (embeddings, states) if number == 0 else (states,)
        states = layer(*inputs, mask, cache, cache.offset)
    return states


def _in_order(token_ids: mx.array, start: int) -> mx.array:
    """Positions of text, (3, rows, tokens)."""
    rows, count = token_ids.shape
    return mx.broadcast_to(mx.arange(start, start + count), (3, rows, count))
