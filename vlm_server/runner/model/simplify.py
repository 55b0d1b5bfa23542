"""Fewer and cheaper operations of equal result in the place of a loaded model's.

On a GPU, most decode steps take as long as the host needs to launch their kernels.
"""

from __future__ import annotations

import math
from functools import partial
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn import Module, RMSNorm  # type: ignore[attr-defined]  # mlx.nn is not typed
from mlx.nn.layers import activations

from vlm_server.runner.device.arrays import to_numpy

_GELU_SLOPE = math.sqrt(2 / math.pi)
_MODULES: tuple[ModuleType, ...] = (activations, nn)
_GELU = "gelu_approx"


def simplify(language_model: Any) -> None:
    """Simplify the operations of a loaded language model, whose weights may be lazy."""
    for mlx_module in _MODULES:
        setattr(mlx_module, _GELU, gelu_approx)
    adds_one = dict[type, bool]()
    for module in language_model.modules():
        _spread_scalars(module)
        children = module.children().items()
        for name, child in [pair for pair in children if isinstance(pair[1], Module)]:
            if type(child) not in adds_one:
                adds_one[type(child)] = _adds_one(child)
            if adds_one[type(child)]:
                module[name] = _with_whole_weight(child)


@partial(mx.compile, shapeless=True)
def gelu_approx(x: mx.array) -> mx.array:
    """`mlx.nn.gelu_approx`, without the power, which takes longer than all else in it."""
    y = x.astype(mx.float32)
    inner = _GELU_SLOPE * (y + 0.044715 * y * y * y)
    return (0.5 * y * (1 + mx.tanh(inner))).astype(x.dtype)


def _spread_scalars(layer: Any) -> None:
    """Make vectors of a decoder layer's factors of one number, such as Gemma 4's `layer_scalar`.

    MLX compiles such numbers into its kernels: each layer would have kernels of its own.
    """
    norm = layer.get("input_layernorm")
    for name, array in layer.items():
        if norm is not None and isinstance(array, mx.array) and array.shape == (1,):
            layer[name] = mx.contiguous(mx.broadcast_to(array, norm.weight.shape))


def _adds_one(norm: Any) -> bool:
    """Whether `norm` is an RMSNorm by `1 + weight`, such as Gemma 3's."""
    if type(norm) is RMSNorm or norm.keys() != {"weight"} or not hasattr(norm, "eps"):
        return False
    weight = mx.linspace(-0.5, 0.5, norm.weight.size)
    original, norm.weight = norm.weight, weight
    x = mx.linspace(-1, 1, weight.size)[None]
    try:
        is_equal = mx.array_equal(norm(x), mx.fast.rms_norm(x, 1.0 + weight, norm.eps))
        return bool(to_numpy(is_equal))
    finally:
        norm.weight = original


def _with_whole_weight(norm: Any) -> Any:
    whole = RMSNorm(1, norm.eps)
    whole.weight = 1.0 + norm.weight
    return whole
