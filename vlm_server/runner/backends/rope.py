"""Applies rotary position embeddings (RoPE) to queries and keys, given their angles."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

_THETA = 10000.0


class Rope:
    """Rotates the pairs (i, i + half) of each head's numbers, in float32.

    cosines, sines: (..., half) float32, which broadcast against half a head.
    """

    def __init__(self, cosines: mx.array, sines: mx.array) -> None:
        self.cosines, self.sines = cosines, sines
        self._by_half = cosines[..., None, :], mx.stack([-sines, sines], axis=-2)

    def in_parts(self, x: mx.array) -> mx.array:
        """RoPE of `x`, (..., head size), on a CPU, where contiguous halves beat few operations."""
        first, second = mx.split(x, 2, axis=-1)
        rotated = [
            first * self.cosines - second * self.sines,
            second * self.cosines + first * self.sines,
        ]
        return mx.concatenate(rotated, axis=-1).astype(x.dtype)

    def in_one_kernel(self, x: mx.array) -> mx.array:
        """RoPE of `x` on a GPU, whose single operations would each read and write all of `x`."""
        halves = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
        rotated: mx.array = _compiled(halves, halves[..., ::-1, :], *self._by_half)
        return rotated.reshape(x.shape)


def _rotate(halves: mx.array, swapped: mx.array, cosines: mx.array, sines: mx.array) -> mx.array:
    rotated = halves.astype(mx.float32) * cosines + swapped.astype(mx.float32) * sines
    return rotated.astype(halves.dtype)


_compiled = mx.compile(_rotate, shapeless=True)


def image_rope(positions: NDArray[np.int32], head_size: int) -> Rope:
    """RoPE at `positions` (patches, 2), for (frames, patches, any, heads, head size).

    Half of a head's angles grow with the patch's row, the other half with its column.
    """
    quarter = head_size // 4
    exponents = np.arange(quarter, dtype=np.float32) / np.float32(quarter)
    frequencies = 1.0 / np.float32(_THETA) ** exponents
    angles = positions[:, :, None].astype(np.float32) * frequencies
    angles = angles.reshape(1, len(positions), 1, 1, 2 * quarter)
    return Rope(mx.array(np.cos(angles)), mx.array(np.sin(angles)))
