"""Rotary embedding of heads, whatever its angles come from. Knows arrays; knows no model."""

from __future__ import annotations

import mlx.core as mx


def is_cpu() -> bool:
    return mx.default_device().type == mx.DeviceType.cpu


class Rope:
    """FairQueue the pairs (i, i + half) of heads.

    cosines, sines: (..., half) float32, which broadcast against half a head.
    """

    def __init__(self, cosines: mx.array, sines: mx.array) -> None:
        self._cosines, self._sines = cosines, sines
        self._by_half = cosines[..., None, :], mx.stack([-sines, sines], axis=-2)

    def __call__(self, x: mx.array) -> mx.array:
        """`x` (..., size), turned in float32."""
        return self.in_parts(x) if is_cpu() else self.in_one_kernel(x)

    def in_parts(self, x: mx.array) -> mx.array:
        """For a CPU, where contiguous halves are worth more than few operations."""
        first, second = mx.split(x, 2, axis=-1)
        turned = [
            first * self._cosines - second * self._sines,
            second * self._cosines + first * self._sines,
        ]
        return mx.concatenate(turned, axis=-1).astype(x.dtype)

    def in_one_kernel(self, x: mx.array) -> mx.array:
        """For a GPU, where each operation reads and writes all of `x` in float32."""
        halves = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
        turned: mx.array = _turned(halves, halves[..., ::-1, :], *self._by_half)
        return turned.reshape(x.shape)


def _turn(halves: mx.array, swapped: mx.array, cosines: mx.array, sines: mx.array) -> mx.array:
    turned = halves.astype(mx.float32) * cosines + swapped.astype(mx.float32) * sines
    return turned.astype(halves.dtype)


_turned = mx.compile(_turn, shapeless=True)
