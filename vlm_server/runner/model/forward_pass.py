"""The functions to compile: mlx-vlm's forward pass, on buffers with bounds on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_vlm.models.cache import ArraysCache

from vlm_server.runner.backends.bounded_layer import (
    BoundedLayer,
    MixedLayer,
    MixedStates,
    StepStates,
)
from vlm_server.runner.device.arrays import to_numpy
from vlm_server.runner.kv.batch_cache import advance
from vlm_server.runner.model.adapters import applied
from vlm_server.runner.model.attention import ModelAttention
from vlm_server.runner.model.chunks import TOKEN_AXES, StepOutput
from vlm_server.runner.model.lm_head import WantedLogits, logits_of

logger = logging.getLogger(__name__)

Buffers = list[tuple[mx.array, ...]]
"""For each layer its keys and values, (rows, heads, capacity, head size), or its states."""
Bounds = Sequence[mx.array]
"""For each window of the layers, the bounds of `BoundedLayer`."""
Inputs = dict[str, mx.array]
Outputs = list[Any]
"""Logits, and hidden states if they are kept."""
Embed = Callable[[mx.array], Inputs]
"""Token ids, (rows, 1), to the inputs of a language model that depend on them."""
ModelArguments = Callable[[Inputs], Mapping[str, Any]]
"""The inputs of a pass as a family's arguments."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """has_states: whether a layer has states rather than keys and values. window: of keys."""

    has_states: bool = False
    window: int | None = None


class Rows(NamedTuple):
    """Sequences that decode: token ids, (rows, tokens), and what belongs to them."""

    token_ids: mx.array
    bounds: Bounds
    buffers: Buffers
    inputs: Inputs


@dataclass(frozen=True, slots=True)
class Target:
    """The layers of `cache`, to which `num_new` tokens of each row are appended."""

    cache: list[Any]
    num_new: int
    bounds: list[mx.array]
    buffers: Buffers

    def rows(self, token_ids: mx.array, inputs: Inputs) -> Rows:
        return Rows(token_ids, self.bounds, self.buffers, inputs)

    def advance(self, new: Buffers) -> None:
        """Count the new tokens; `new` is what was not changed in place."""
        for layer, arrays in zip(self.cache, new, strict=True):
            if isinstance(layer, ArraysCache):
                layer.cache = list(arrays)
                continue
            if arrays:
                layer.keys, layer.values = arrays
            advance(layer, self.num_new)


class ForwardPass:
    """Functions of arrays alone, to be compiled.

    They raise the model's error if it reads values, and NotImplementedError if it does not attend
    by `scaled_dot_product_attention`.
    """

    def __init__(
        self,
        language_model: Any,
        attention: ModelAttention,
        kinds: Sequence[LayerKind],
        arguments: ModelArguments,
        embed: Embed | None,
        *,
        keeps_hidden: bool = False,
    ) -> None:
        """`kinds`: of the layers. `embed`: None if unknown; passes with `rows` and a prompt need
        it. `keeps_hidden`: see `TextModel`."""
        self._keeps_hidden = keeps_hidden
        self._language_model = language_model
        self._attention = attention
        self._kinds = kinds
        self.windows = list(dict.fromkeys(kind.window for kind in kinds if not kind.has_states))
        self._arguments = arguments
        self._embed = embed
        self._in_place = attention.attention.appends_in_place

    def run(
        self, token_ids: mx.array, bounds: Bounds, buffers: Buffers, inputs: Inputs
    ) -> tuple[Outputs, Buffers]:
        """Append `token_ids`, (rows, tokens).

        Returns the outputs of all, and for each layer what was not changed in place.
        """
        layers = self._layers(bounds, buffers)
        wanted = WantedLogits(token_ids.shape[1])
        return self._call(token_ids, layers, inputs, wanted), self._new(layers)

    def run_prompt(
        self,
        rows: Rows | None,
        prompt: Rows,
        logit_rows: mx.array,
        points: mx.array | None = None,
    ) -> tuple[Outputs, tuple[Buffers, Buffers, list[Buffers]]]:
        """Append a token to each of `rows`, if there are any, and a prompt's (1, tokens).

        To the model, each token is a row of its own. Returns the logits of `logit_rows` of these,
        the hidden states of all, of both what was not changed in place, and for each of `points`
        the states of the layers that have some: see `MixedStates`.
        """
        count = prompt.token_ids.shape[1]
        num_new = prompt.bounds[0][:, 2]
        prompt_layers = self._layers(prompt.bounds, prompt.buffers, num_new)
        ids, inputs = prompt.token_ids.T, _as_rows(prompt.inputs)
        decode_layers: list[Any] = [None] * len(prompt_layers)
        if rows is not None:
            assert self._embed is not None
            decode_layers = self._layers(rows.bounds, rows.buffers)
            inputs = _concatenate(
                self._embed(rows.token_ids) | rows.inputs, inputs, len(rows.token_ids)
            )
            ids = mx.concatenate([rows.token_ids, ids])
        num_rows = len(ids) - count
        layers = [
            MixedStates(row, layer, num_rows, points)
            if isinstance(layer, StepStates)
            else MixedLayer(row, layer, count)
            for row, layer in zip(decode_layers, prompt_layers, strict=True)
        ]
        outputs = self._call(ids, layers, inputs, WantedLogits(rows=logit_rows))
        new_kv = [] if rows is None else self._new(decode_layers)
        states = [layer.parts[:-1] for layer in layers if isinstance(layer, MixedStates)]
        at_points = [[tuple(part.cache) for part in parts] for parts in zip(*states, strict=True)]
        return outputs, (new_kv, self._new(prompt_layers), at_points)

    def _layers(
        self, bounds: Bounds, buffers: Buffers, num_new: mx.array | None = None
    ) -> list[Any]:
        """`num_new`: the number of tokens that are not padding, of each row."""
        by_window = dict(zip(self.windows, bounds, strict=True))
        return [
            StepStates(arrays, num_new)
            if kind.has_states
            else BoundedLayer(
                arrays[0],
                arrays[1],
                by_window[kind.window],
                in_place=self._in_place,
                window=kind.window,
            )
            for kind, arrays in zip(self._kinds, buffers, strict=True)
        ]

    def _call(
        self, token_ids: mx.array, layers: Sequence[Any], inputs: Inputs, wanted: WantedLogits
    ) -> Outputs:
        logits_wanted = logits_of(self._language_model, wanted)
        with applied(inputs) as others, self._attention.in_place(), logits_wanted as seen:
            arguments = self._arguments(others)
            output = self._language_model(token_ids, cache=layers, **arguments)
        if not all(getattr(layer, "was_attended", True) for layer in layers):
            raise NotImplementedError("it attends in a way of its own")
        return [output.logits, seen.all] if self._keeps_hidden else [output.logits]

    def _new(self, layers: Sequence[Any]) -> Buffers:
        """The new states, and the new buffers if they were not written in place."""
        return [
            tuple(layer.cache)
            if isinstance(layer, StepStates)
            else (() if self._in_place else (layer.keys, layer.values))
            for layer in layers
        ]


def output_of_rows(outputs: Outputs, num_rows: int | None = None) -> StepOutput:
    """That of the first `num_rows` of a pass, or of all."""
    logits, *hidden = (array[:num_rows] for array in outputs)
    return StepOutput(logits, mx.contiguous(hidden[0]) if hidden else None)


def output_of_prompt(
    outputs: Outputs, first: int, count: int, states: Sequence[Buffers]
) -> StepOutput:
    """That of a prompt whose tokens are the rows from `first` on; the others are padding."""
    logits, *hidden = (array[first:] for array in outputs)
    return StepOutput(logits, hidden[0][:count].swapaxes(0, 1) if hidden else None, states)


def _as_rows(inputs: Inputs) -> Inputs:
    """Inputs of one row with many tokens as those of as many rows with one token."""
    return {
        name: array.swapaxes(TOKEN_AXES[name] - 1, TOKEN_AXES[name])
        for name, array in inputs.items()
    }


def _concatenate(first: Inputs, second: Inputs, num_rows: int) -> Inputs:
    """Inputs of `num_rows` rows followed by others; inputs that the first lack are zeros."""
    inputs = {}
    for name, second_array in second.items():
        axis = TOKEN_AXES[name] - 1
        first_array = first.get(name)
        if first_array is None:
            shape = list(second_array.shape)
            shape[axis] = num_rows
            first_array = mx.zeros(shape, second_array.dtype)
        elif first_array.ndim < second_array.ndim:  # one position for all three axes
            shape = [len(second_array), *first_array.shape]
            first_array = mx.broadcast_to(first_array[None], shape)
        inputs[name] = mx.concatenate([first_array, second_array], axis=axis)
    return inputs


def embed_text(model: Any, token_ids: mx.array) -> Inputs:
    """The inputs of a language model for `token_ids`, (rows, tokens), of text; lazy."""
    embeddings = model.get_input_embeddings(token_ids, None, mask=mx.ones_like(token_ids))
    inputs = {
        "inputs_embeds": embeddings.inputs_embeds,
        "per_layer_inputs": embeddings.per_layer_inputs,
    }
    return {name: array for name, array in inputs.items() if array is not None}


def text_inputs(model: Any) -> Embed | None:
    """The inputs of `model` for text, if they depend on each token alone; else None."""

    def embed(token_ids: mx.array) -> Inputs:
        return _as_rows(embed_text(model, token_ids.T))

    try:
        token_ids = mx.arange(8)[:, None]
        inputs, reversed_inputs = embed(token_ids), embed(token_ids[::-1])
        are_equal = [mx.array_equal(inputs[name][::-1], reversed_inputs[name]) for name in inputs]
        depends_on_token = all(to_numpy(equal).item() for equal in are_equal)
    except Exception:
        logger.debug("this model has no mixed steps", exc_info=True)
        return None
    return embed if depends_on_token else None
