"""Experts on CUDA, dense or quantized, whose rows our kernel multiplies where they are many.

MLX's product of quantized experts reads an expert's weights again for each row, and its dense one
takes weights that are dequantized first, those of all experts of a layer. Ours reads them once for
each 64 rows, and dequantizes them in registers: see `linear_kernels.expert_rows`. On an H200, 256
experts of 512 x 2048 in 4 bits take for 256, 1,024 and 5,120 rows 0.14, 0.47 and 2.2 ms by MLX's,
1.4 dequantized (the last ones), and 0.21, 0.30 and 0.32 by ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_vlm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from vlm_server.runner.backends.cuda import linear_kernels
from vlm_server.runner.backends.cuda.linear_kernels import Packing
from vlm_server.runner.backends.interface import RowsLayer

_FEW_ROWS = 2
"""The number of rows of each expert that MLX's product multiplies sooner."""

_PARAMETERS = ("weight", "scales", "biases", "bias")
"""What experts may have."""

Multiply = Callable[[mx.array, mx.array, mx.array | None, mx.array, Packing | None], mx.array]
"""`x @ weight[expert].T + bias[expert]`: see `linear_kernels.expert_rows`."""


class _ExpertRowsLinear(RowsLayer):
    """Experts whose weights `expert_rows` takes."""

    multiply: Multiply

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        dtype, depth = _input_of(self)
        are_many = sorted_indices and indices.size > _FEW_ROWS * self.num_experts  # type: ignore[attr-defined]
        if not are_many or x.dtype != dtype or x.size != indices.size * depth:
            return super().__call__(x, indices, sorted_indices)  # type: ignore[misc, no-any-return]
        rows, experts = x.reshape(-1, depth), indices.astype(mx.uint32)
        product = self.multiply(rows, self.weight, self.get("bias"), experts, _packing_of(self))  # type: ignore[attr-defined]
        return product.reshape(*x.shape[:-1], -1)


_EXPERT_ROWS: dict[type, type] = {
    layer: type(f"ExpertRows{layer.__name__}", (_ExpertRowsLinear, layer), {})
    for layer in (SwitchLinear, QuantizedSwitchLinear)
}
"""The class of experts of sorted rows, by that of mlx-vlm's experts."""


def use_expert_kernels(model: Any, multiply: Multiply = linear_kernels.expert_rows) -> None:
    """Let the experts of a loaded model take sorted rows by `multiply`, if it supports them."""
    for layer in model.modules():
        if type(layer) in _EXPERT_ROWS and _is_taken(layer):
            for name in _PARAMETERS:
                if name in layer:  # some are views, which the kernel would copy at each call
                    layer[name] = mx.contiguous(layer[name])
            layer.__class__ = _EXPERT_ROWS[type(layer)]
            layer.multiply = multiply


def _is_taken(layer: Any) -> bool:
    """Whether the kernel takes the weights of experts."""
    packing, (dtype, depth) = _packing_of(layer), _input_of(layer)
    if packing is not None and not (layer.mode == "affine" and packing.is_taken):
        return False
    if "bias" in layer and layer.bias.dtype != dtype:
        return False
    return dtype in linear_kernels.DTYPES and depth % linear_kernels.SKINNY_DEPTH == 0


def _packing_of(layer: Any) -> Packing | None:
    if "scales" not in layer:
        return None
    return Packing(layer.scales, layer.get("biases"), layer.bits, layer.group_size)


def _input_of(layer: Any) -> tuple[mx.Dtype, int]:
    """Type and depth of the rows that experts multiply."""
    dtype = layer.scales.dtype if "scales" in layer else layer.weight.dtype
    return dtype, layer.input_dims
