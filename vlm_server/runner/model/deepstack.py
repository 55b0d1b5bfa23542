"""Deepstack: features of images that a language model adds after several of its first layers.

Here they are an input like others, with an entry for each token and zeros for text: "embeds",
(rows, tokens, layers, hidden), and the mask of the tokens that have some.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

EMBEDS = "deepstack_visual_embeds"
MASK = "visual_pos_masks"
_ADD = "_deepstack_process"


class Deepstack(enum.Enum):
    """The form in which the features are passed to a language model."""

    BY_LAYER = "a list of (rows, tokens, hidden), by layer"
    ALL_ROWS = "(rows, tokens, layers, hidden)"
    BY_PLACE = "a list of (tokens of the prompt, hidden), which it slices itself"

    def arguments(self, inputs: Mapping[str, mx.array]) -> Mapping[str, Any]:
        """The inputs of a pass as arguments of a language model."""
        if EMBEDS not in inputs or self is Deepstack.ALL_ROWS:
            return inputs
        embeds, mask = inputs[EMBEDS], inputs[MASK]
        layers = [embeds[:, :, layer] for layer in range(embeds.shape[2])]
        if self is Deepstack.BY_PLACE:
            return {**inputs, EMBEDS: [_Sliced(part) for part in layers], MASK: _Sliced(mask)}
        return {**inputs, EMBEDS: layers}


class _Sliced:
    """A slice that any slicing returns, for a model that slices an array of the whole prompt."""

    def __init__(self, part: mx.array) -> None:
        self._part = part

    def __getitem__(self, _: Any) -> mx.array:
        return self._part


def add_to_all_tokens(language_model: Any) -> None:
    """Let a model with a list by layer add features to all tokens.

    mlx-vlm adds rows for visual tokens alone, whose places the host has to read first.
    """
    text = getattr(language_model, "model", None)
    if hasattr(text, _ADD):
        text.__class__ = type("Deepstacked", (type(text),), {_ADD: _add})


def _add(_: Any, hidden_states: mx.array, __: mx.array, visual_embeds: mx.array) -> mx.array:
    return hidden_states + visual_embeds
