"""What our kernel of experts computes, by MLX."""

from __future__ import annotations

import mlx.core as mx

from vlm_server.runner.backends.cuda.linear_kernels import Packing


def multiply_by_expert(
    x: mx.array,
    weight: mx.array,
    bias: mx.array | None,
    experts: mx.array,
    packing: Packing | None = None,
) -> mx.array:
    """See `linear_kernels.expert_rows`."""
    if packing is not None:
        scales, offsets = packing.scales, packing.offsets
        weight = mx.dequantize(weight, scales, offsets, packing.group_size, packing.bits)
    product = (x[:, None] @ weight[experts].swapaxes(1, 2))[:, 0]
    return product if bias is None else product + bias[experts]
