"""Dequantized weights where a device multiplies dense ones faster.

MLX multiplies quantized weights on CPUs by a loop of its own, row by row, and dense ones by
OpenBLAS: of 2048 x 512 numbers in 4 bits, eight rows take 7.6 ms, and 0.4 in float32. On an H100,
1,152 rows and 11008 x 2048 numbers take 0.41 ms, 0.13 with the time to dequantize them, and 0.09
if they are dense; 9,240 rows of 256 experts of 2048 x 512 take 3.9 ms, and 1.4 dequantized.
"""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx
from mlx.nn import (  # type: ignore[attr-defined]  # mlx.nn is not typed
    Embedding,
    Linear,
    QuantizedEmbedding,
    QuantizedLinear,
)
from mlx_vlm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

logger = logging.getLogger(__name__)

_DENSE: dict[type, type] = {
    QuantizedLinear: Linear,
    QuantizedEmbedding: Embedding,
    QuantizedSwitchLinear: SwitchLinear,
}
_SHARE_OF_FREE = 2
"""Dense copies may take one in so many of the free bytes."""
_FEW_ROWS = 3
"""The number of rows that MLX's quantized product multiplies sooner than it dequantizes weights."""
_FEW_ROWS_OF_EXPERT = 14
"""The same of each expert; on an H100, its dense product takes as long as 14 quantized rows."""


class DequantizingLinear(QuantizedLinear):  # type: ignore[misc]
    """A `QuantizedLinear` that multiplies many rows by dequantized weights."""

    def __call__(self, x: mx.array) -> mx.array:
        if x.size <= _FEW_ROWS * x.shape[-1]:
            return super().__call__(x)  # type: ignore[no-any-return]
        rows = x.reshape(-1, x.shape[-1]) @ _dequantize_layer(self).T
        rows = rows + self.bias if "bias" in self else rows
        return rows.reshape(*x.shape[:-1], -1)


class DequantizingSwitchLinear(QuantizedSwitchLinear):  # type: ignore[misc]
    """A `QuantizedSwitchLinear` that multiplies many rows, sorted by expert, by dequantized
    weights."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        if not sorted_indices or indices.size <= _FEW_ROWS_OF_EXPERT * self.num_experts:
            return super().__call__(x, indices, sorted_indices)  # type: ignore[no-any-return]
        weights = _dequantize_layer(self).swapaxes(-1, -2)
        rows = mx.gather_mm(x, weights, rhs_indices=indices, sorted_indices=True)
        return rows + self.bias[indices][:, None] if "bias" in self else rows


_DEQUANTIZING: dict[type, type] = {
    QuantizedLinear: DequantizingLinear,
    QuantizedSwitchLinear: DequantizingSwitchLinear,
}


def dequantize(model: Any, free_bytes: int) -> None:
    """Replace the quantized layers of a loaded model by dense ones, if these take a part of
    `free_bytes` alone; else let its layers dequantize their weights for many rows."""
    layers = [
        module for module in model.modules() if type(module) in _DENSE and module.mode == "affine"
    ]
    added_bytes = sum(_dense_bytes(layer) - _packed_bytes(layer) for layer in layers)
    if added_bytes > free_bytes // _SHARE_OF_FREE:
        dequantize_for_many_rows(model)
        return
    if layers:
        logger.debug(
            "dequantized the weights: %d MiB more, and faster on this device", added_bytes >> 20
        )
    for layer in layers:
        weight = _dequantize_layer(layer)
        for name in ("scales", "biases"):
            layer.pop(name)
        for name in ("bits", "group_size", "mode"):
            delattr(layer, name)
        layer.__class__ = _DENSE[type(layer)]
        layer.weight = weight


def dequantize_for_many_rows(model: Any) -> None:
    """Let the quantized linear layers and experts of a loaded model dequantize their weights for
    many rows."""
    for layer in model.modules():
        if type(layer) in _DEQUANTIZING and layer.mode == "affine":
            layer.__class__ = _DEQUANTIZING[type(layer)]


def _dequantize_layer(layer: Any) -> mx.array:
    return mx.dequantize(
        layer.weight,
        layer.scales,
        layer.get("biases"),
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
    )


def _dense_bytes(layer: Any) -> int:
    return int(layer.weight.size * 32 // layer.bits * layer.scales.dtype.size)


def _packed_bytes(layer: Any) -> int:
    return sum(layer[name].nbytes for name in ("weight", "scales", "biases") if name in layer)
