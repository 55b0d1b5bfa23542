"""The hidden states of a step that a draft head gets.

They are the input of `lm_head`, or those of some layers, one beside the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from vlm_server.errors import ModelLoadError
from vlm_server.runner.kv.layers import new_layers

_PROBE_TOKENS = 2


@dataclass(slots=True)
class HiddenStates:
    """What one step has put in, lazy: arrays of (rows, tokens, hidden)."""

    of_head: mx.array | None = None
    of_layers: list[mx.array] = field(default_factory=list)

    @property
    def all(self) -> mx.array | None:
        """(rows, tokens, hidden); None if nothing was put in."""
        if self.of_layers:
            return mx.concatenate(self.of_layers, axis=-1)
        return self.of_head


class KeptInput:
    """A layer whose input is kept while `seen` is there to take it."""

    seen: HiddenStates | None = None


def keep_inputs(language_model: Any, numbers: Sequence[int]) -> None:
    """Let `HiddenStates` be the inputs of these layers. Raises ModelLoadError if they can't be."""
    layers = language_model.layers
    if not all(0 <= number < len(layers) for number in numbers):
        raise ModelLoadError(f"the drafter asks for layers {list(numbers)} of {len(layers)}")
    for number in numbers:
        layer = layers[number]
        if not isinstance(layer, KeptInput):
            layer.__class__ = _keeping(type(layer))
    seen, count = HiddenStates(), len(numbers)
    with_inputs = kept_layers(language_model)
    for layer in with_inputs:
        layer.seen = seen
    language_model(mx.zeros((1, _PROBE_TOKENS), mx.int32), cache=new_layers(language_model))
    for layer in with_inputs:
        layer.seen = None
    if [array.shape[:2] for array in seen.of_layers] != [(1, _PROBE_TOKENS)] * count:
        raise ModelLoadError("no drafter fits this model: its layers hide their hidden states")


def kept_layers(language_model: Any) -> list[Any]:
    """The layers of `keep_inputs`."""
    layers = getattr(language_model, "layers", ())
    return [layer for layer in layers if isinstance(layer, KeptInput)]


def _keeping(layer_type: Any) -> type:
    call = layer_type.__call__

    def keeping_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.seen is not None:
            self.seen.of_layers.append(args[0] if args else next(iter(kwargs.values())))
        return call(self, *args, **kwargs)

    return type(f"Kept{layer_type.__name__}", (KeptInput, layer_type), {"__call__": keeping_call})
