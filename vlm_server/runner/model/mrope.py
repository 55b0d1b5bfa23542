"""One M-RoPE embedding that all layers of a language model share.

mlx-vlm compiles its M-RoPE for each input shape, and MLX keeps every compilation: 24 KB for each
prompt length that ever occurred. Here the angles of a call are computed once for all layers, and
RoPE is applied by code that is compiled once for all shapes.

A text token has one position three times, whatever the family: there M-RoPE is plain RoPE.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.rope_utils import MRoPERotaryEmbedding

from vlm_server.runner.backends.interface import Rotate
from vlm_server.runner.backends.rope import Rope

_STYLES = frozenset({"chunked", "interleaved"})
"""Styles of M-RoPE in which each frequency follows one of the three positions."""
_POSITION_STATE = ("_position_ids", "_rope_deltas")
"""Attributes in which a language model with M-RoPE keeps a prompt's positions between calls. Ours
belong to the request, so these are cleared."""


class DecodePositions(enum.Enum):
    """The shape of `position_ids` of a decode step."""

    NONE = "none"
    """No argument: the language model counts by its cache."""
    ONE = "(rows, 1)"
    THREE = "(3, rows, 1)"


def next_position_ids(
    kind: DecodePositions, positions: Sequence[int], width: int
) -> dict[str, mx.array]:
    """The argument of a step of `width` tokens a row, given each row's first position."""
    if kind is DecodePositions.NONE:
        return {}
    first_positions = mx.array(list(positions))[:, None]
    ids = first_positions if width == 1 else first_positions + mx.arange(width)
    if width > 1 or kind is DecodePositions.THREE:
        ids = mx.broadcast_to(ids[None], (3, *ids.shape))
    return {"position_ids": ids}


def forget_positions(language_model: Any) -> None:
    """Clear the positions that `language_model` keeps of a prompt."""
    for name in _POSITION_STATE:
        if hasattr(language_model, name):
            setattr(language_model, name, None)


def keeps_positions(language_model: Any) -> bool:
    """Whether `forget_positions` has any effect."""
    return any(hasattr(language_model, name) for name in _POSITION_STATE)


def use_shared_mrope(language_model: Any, rotate: Rotate | None = None) -> DecodePositions:
    """Let all layers share one rotary embedding, if it is of a known kind.

    Returns the shape of decode steps' positions. `rotate`: None for operations of MLX.
    """
    layers = getattr(language_model, "layers", ())
    attentions = [a for layer in layers if (a := getattr(layer, "self_attn", None)) is not None]
    embeddings: list[Any] = [getattr(attention, "rotary_emb", None) for attention in attentions]
    if not embeddings or not all(_is_known(embedding) for embedding in embeddings):
        return DecodePositions.THREE
    if len({(e.dim, e.base, e.style, tuple(e.mrope_section)) for e in embeddings}) > 1:
        return DecodePositions.THREE
    shared = SharedMRope(embeddings[0], len(embeddings), rotate)
    for attention in attentions:
        attention.rotary_emb = shared
    return DecodePositions.ONE


def _is_known(embedding: Any) -> bool:
    return (
        isinstance(embedding, MRoPERotaryEmbedding)
        and embedding.style in _STYLES
        and embedding.attention_scaling == 1.0
    )


class SharedMRope(nn.Module):  # type: ignore[misc,name-defined]  # mlx.nn is not typed
    """The M-RoPE of one language model's `num_layers` layers, applied in float32."""

    fused_apply = True
    """Tells mlx-vlm's layers to call `apply_rotary`."""

    def __init__(
        self, embedding: MRoPERotaryEmbedding, num_layers: int, rotate: Rotate | None = None
    ) -> None:
        super().__init__()
        self._rotate = rotate
        self._embedding = embedding
        self._num_layers = num_layers
        self._layers_left = 0
        self._positions: mx.array | None = None
        self._shared: Rope | None = None
        """The angles at `_positions`, for all layers."""

    def apply_rotary(
        self,
        q: mx.array,
        k: mx.array,
        position_ids: mx.array,
        *,
        unsqueeze_dim: int = 1,
        cast_output: bool = True,
    ) -> tuple[mx.array, mx.array]:
        """RoPE of `q` and `k`, (rows, heads, tokens, head size), at their positions.

        position_ids: (rows, 1) for one text token a row, (3, rows, tokens) for all else.
        """
        assert unsqueeze_dim == 1
        assert cast_output
        if position_ids is not self._positions:
            self._positions, self._layers_left = position_ids, self._num_layers
            self._shared = self._rope(position_ids)
        assert self._shared is not None
        if self._rotate is not None:
            rotated = self._rotate(q, k, self._shared.cosines, self._shared.sines)
        else:
            rotated = self._by_mlx(q), self._by_mlx(k)
        self._layers_left -= 1
        if not self._layers_left:
            self._positions = self._shared = None
        return rotated

    def _rope(self, position_ids: mx.array) -> Rope:
        positions = position_ids[..., None]
        if position_ids.ndim == 3:
            by_frequency = mx.take(position_ids, self._embedding.position_selector, axis=0)
            positions = by_frequency.transpose(1, 2, 0)
        angles = positions.astype(mx.float32) * self._embedding.inv_freq
        return Rope(mx.cos(angles)[:, None], mx.sin(angles)[:, None])

    def _by_mlx(self, x: mx.array) -> mx.array:
        assert self._shared is not None
        dim, apply = self._embedding.dim, self._shared.in_one_kernel
        if dim == x.shape[-1]:
            return apply(x)
        return mx.concatenate([apply(x[..., :dim]), x[..., dim:]], axis=-1)
