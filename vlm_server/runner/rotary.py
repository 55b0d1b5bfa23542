"""Rotary embedding in one kernel for queries and one for keys, for GPUs without Metal's fused one.

mlx-vlm composes M-RoPE of some 14 kernels a layer, and launching them is what a decode step of
few rows waits for. A token of text has one position, whatever family: there M-RoPE is plain RoPE.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.rope_utils import MRoPERotaryEmbedding, apply_multimodal_rotary_pos_emb

from vlm_server.runner.rotation import Rotation


def use_fast_rotary(language_model: Any) -> bool:
    """Let all layers share one rotary embedding; False if the model's is not a known kind.

    Decode steps then pass positions as (rows, 1).
    """
    attentions = _attentions(language_model)
    embeddings: list[Any] = [getattr(attention, "rotary_emb", None) for attention in attentions]
    if not embeddings or not all(_is_known(embedding) for embedding in embeddings):
        return False
    if len({(e.dim, e.base, e.style, tuple(e.mrope_section)) for e in embeddings}) > 1:
        return False
    shared = FastRotary(embeddings[0])
    for attention in attentions:
        attention.rotary_emb = shared
    return True


def has_fast_rotary(language_model: Any) -> bool:
    """Whether decode steps may pass positions as (rows, 1)."""
    return any(
        isinstance(getattr(attention, "rotary_emb", None), FastRotary)
        for attention in _attentions(language_model)
    )


def _attentions(language_model: Any) -> list[Any]:
    layers = getattr(language_model, "layers", ())
    return [a for layer in layers if (a := getattr(layer, "self_attn", None)) is not None]


def _is_known(embedding: Any) -> bool:
    return (
        isinstance(embedding, MRoPERotaryEmbedding)
        and embedding.pairing == "half_split"
        and embedding.attention_scaling == 1.0
        and not embedding.fused_apply
    )


class FastRotary(nn.Module):  # type: ignore[misc,name-defined]  # mlx.nn is not typed
    """One model's M-RoPE, turned in float32."""

    fused_apply = True
    """Tells mlx-vlm's layers to call `apply_rotary`."""

    def __init__(self, embedding: MRoPERotaryEmbedding) -> None:
        super().__init__()
        self._embedding = embedding
        self._periods = 1.0 / embedding.inv_freq
        self._positions: mx.array | None = None
        self._turns: Any = None
        """What all layers need of `_positions`: an offset (1,), or a `Rotation`."""

    def apply_rotary(
        self,
        q: mx.array,
        k: mx.array,
        position_ids: mx.array,
        *,
        unsqueeze_dim: int = 1,
        cast_output: bool = True,
    ) -> tuple[mx.array, mx.array]:
        """`q` and `k`, (rows, heads, tokens, head size), turned by their positions.

        position_ids: (rows, 1) for one token of text a row, (3, rows, tokens) for all else.
        """
        assert unsqueeze_dim == 1
        assert cast_output
        is_one = position_ids.shape == (1, 1)
        if position_ids is not self._positions:
            self._positions = position_ids
            self._turns = position_ids[:, 0] if is_one else self._rotation(position_ids)
        turn = self._turn_one if is_one else self._turn
        return turn(q), turn(k)

    def _rotation(self, position_ids: mx.array) -> Rotation:
        """What mlx-vlm turns heads by at these positions: seen by what becomes of (1, 0)."""
        if position_ids.ndim == 2:
            position_ids = mx.broadcast_to(position_ids, (3, *position_ids.shape))
        dim, (_, rows, tokens) = self._embedding.dim, position_ids.shape
        along = mx.broadcast_to(mx.arange(dim) < dim // 2, (rows, 1, tokens, dim))
        along = along.astype(mx.float32)
        turned, _ = apply_multimodal_rotary_pos_emb(
            along,
            along,
            *self._embedding(along, position_ids),
            mrope_section=self._embedding.mrope_section,
            style=self._embedding.style,
        )
        return Rotation(*mx.split(turned, 2, axis=-1))

    def _turn(self, x: mx.array) -> mx.array:
        dim = self._embedding.dim
        if dim == x.shape[-1]:
            return self._turns(x)  # type: ignore[no-any-return]
        return mx.concatenate([self._turns(x[..., :dim]), x[..., dim:]], axis=-1)

    def _turn_one(self, x: mx.array) -> mx.array:
        """The least to launch. Of several rows, MLX takes four times as long for it on CUDA."""
        return mx.fast.rope(
            x, self._embedding.dim, traditional=False, base=None, scale=1.0,
            offset=self._turns, freqs=self._periods,
        )  # fmt: skip
