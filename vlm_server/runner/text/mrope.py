"""One M-RoPE embedding that all layers of a language model share.

mlx-vlm compiles its M-RoPE for each input shape, and MLX keeps every compilation: 24 KB for each
prompt length that ever occurred. Here the angles of a call are computed once for all layers, and
RoPE is applied by code that is compiled once for all shapes.

On a GPU, launching kernels is what a decode step of few sequences waits for. A text token has one
position three times, whatever the family: there M-RoPE is plain RoPE, for which MLX has one
kernel. Metal is left out: mlx-vlm has an M-RoPE kernel for it.
"""

from __future__ import annotations

import enum
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.rope_utils import MRoPERotaryEmbedding

from vlm_server.runner.rope import Rope

_STYLES = frozenset({"chunked", "interleaved"})
"""Those in which each frequency follows one of the three positions."""


class DecodePositions(enum.Enum):
    """Which `position_ids` a decode step passes."""

    NONE = "none"
    """The language model counts by its cache."""
    ONE = "(rows, 1)"
    THREE = "(3, rows, 1)"


def use_shared_mrope(language_model: Any, *, has_rope_kernel: bool) -> bool:
    """Let all layers share one rotary embedding; False if the model's is not a known kind.

    Decode steps may then pass one position a row. `has_rope_kernel` says whether `mx.fast.rope`
    is one kernel on this device.
    """
    attentions = _attentions(language_model)
    embeddings: list[Any] = [getattr(attention, "rotary_emb", None) for attention in attentions]
    if not embeddings or not all(_is_known(embedding) for embedding in embeddings):
        return False
    if len({(e.dim, e.base, e.style, tuple(e.mrope_section)) for e in embeddings}) > 1:
        return False
    shared = SharedMRope(embeddings[0], len(embeddings), has_rope_kernel=has_rope_kernel)
    for attention in attentions:
        attention.rotary_emb = shared
    return True


def decode_positions(language_model: Any, *, has_mrope: bool) -> DecodePositions:
    """What decode steps of this model pass, after `use_shared_mrope` was tried."""
    if not has_mrope:
        return DecodePositions.NONE
    shares = any(
        isinstance(getattr(attention, "rotary_emb", None), SharedMRope)
        for attention in _attentions(language_model)
    )
    return DecodePositions.ONE if shares else DecodePositions.THREE


def _attentions(language_model: Any) -> list[Any]:
    layers = getattr(language_model, "layers", ())
    return [a for layer in layers if (a := getattr(layer, "self_attn", None)) is not None]


def _is_known(embedding: Any) -> bool:
    return (
        isinstance(embedding, MRoPERotaryEmbedding)
        and embedding.style in _STYLES
        and embedding.attention_scaling == 1.0
        and not embedding.fused_apply
    )


class SharedMRope(nn.Module):  # type: ignore[misc,name-defined]  # mlx.nn is not typed
    """The M-RoPE of one language model's `num_layers` layers, applied in float32."""

    fused_apply = True
    """Tells mlx-vlm's layers to call `apply_rotary`."""

    def __init__(
        self, embedding: MRoPERotaryEmbedding, num_layers: int, *, has_rope_kernel: bool
    ) -> None:
        super().__init__()
        self._embedding = embedding
        self._periods = 1.0 / embedding.inv_freq
        self._has_rope_kernel = has_rope_kernel
        self._num_layers = num_layers
        self._layers_left = 0
        self._positions: mx.array | None = None
        self._shared: Any = None
        """What all layers need of `_positions`: an offset (1,), or a `Rope`."""

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
        is_one = self._has_rope_kernel and position_ids.shape == (1, 1)
        if position_ids is not self._positions:
            self._positions, self._layers_left = position_ids, self._num_layers
            self._shared = position_ids[:, 0] if is_one else self._rope(position_ids)
        apply = self._apply_one if is_one else self._apply
        rotated = apply(q), apply(k)
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

    def _apply(self, x: mx.array) -> mx.array:
        dim, apply = self._embedding.dim, self._shared.in_one_kernel
        if dim == x.shape[-1]:
            return apply(x)  # type: ignore[no-any-return]
        return mx.concatenate([apply(x[..., :dim]), x[..., dim:]], axis=-1)

    def _apply_one(self, x: mx.array) -> mx.array:
        """The fewest launches. For several rows it takes MLX four times as long on CUDA."""
        return mx.fast.rope(
            x, self._embedding.dim, traditional=False, base=None, scale=1.0,
            offset=self._shared, freqs=self._periods,
        )  # fmt: skip
