"""Linear layers on CUDA, dense or quantized, that multiply the rows of a decode step by our kernel.

MLX multiplies more than one row, or one with a bias, by cuBLAS; recording that takes the host
longer than most of the products take. Its quantized product reads all weights again for each of a
few rows, and for each row of one, (rows, 1, depth), the tokens of a mixed step. So quantized
weights are dequantized for more rows than our kernel takes. Layers with the same input are one
product: queries, keys and values, or both halves of an MLP; in mixed steps, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
from mlx.nn import (  # type: ignore[attr-defined]  # mlx.nn is not typed
    Embedding,
    Linear,
    QuantizedEmbedding,
    QuantizedLinear,
)

from vlm_server.runner.backends.cuda import linear_kernels
from vlm_server.runner.backends.cuda.linear_kernels import Packing
from vlm_server.runner.backends.interface import RowsLayer

_SAME_INPUT = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
)
"""Names of layers that mlx-vlm's modules call with one input."""
_PARAMETERS = ("weight", "scales", "biases", "bias")
"""What a layer may have, a row of each for each of its columns."""

Multiply = Callable[
    [mx.array, mx.array, mx.array | None, Sequence[int], Packing | None], list[mx.array]
]
"""`x @ weight.T + bias`, (..., columns), in parts of such widths: see `skinny_linear`."""


class _FewRowsLinear(RowsLayer):
    """A linear layer whose weights `skinny_linear` takes."""

    product: Product

    def __call__(self, x: mx.array) -> mx.array:
        if self.product.takes(x):
            return self.product.part_of(self, x)
        return super().__call__(x)  # type: ignore[misc, no-any-return]


class _FewRowsEmbedding(RowsLayer):
    """An embedding whose weights `skinny_linear` takes."""

    product: Product

    def as_linear(self, x: mx.array) -> mx.array:
        """The logits of `x`, where the embedding is the lm_head, too."""
        if self.product.takes(x):
            return self.product.part_of(self, x)
        return super().as_linear(x)  # type: ignore[misc, no-any-return]


class Product:
    """One product for one or several layers; of several, their weights become views of its own."""

    def __init__(self, layers: Sequence[Any], multiply: Multiply) -> None:
        self._multiply = multiply
        self._layers = [id(layer) for layer in layers]
        self._widths = [layer.weight.shape[0] for layer in layers]
        first = layers[0]
        joined = {name: first[name] for name in _PARAMETERS if name in first}
        if len(layers) > 1:
            joined = {name: mx.concatenate([layer[name] for layer in layers]) for name in joined}
            ends = list(accumulate(self._widths[:-1]))
            for name, whole in joined.items():
                for layer, part in zip(layers, mx.split(whole, ends), strict=True):
                    layer[name] = part
            mx.eval(joined, [[layer[name] for name in joined] for layer in layers])
        for layer in layers:
            layer.product = self
        self._weight, self._bias = joined["weight"], joined.get("bias")
        self._packing = None
        if "scales" in joined:
            scales, offsets = joined["scales"], joined["biases"]
            self._packing = Packing(scales, offsets, first.bits, first.group_size)
        self._dtype = self._weight.dtype if self._packing is None else self._packing.scales.dtype
        self._input: mx.array | None = None
        self._left: dict[int, mx.array] = {}
        """Parts of `_input` that no layer has asked for yet."""

    def takes(self, x: mx.array) -> bool:
        """Whether `x`, (..., depth), is multiplied here, rather than by MLX's layer."""
        if x.dtype != self._dtype:
            return False
        is_shared = len(self._layers) > 1
        return self._packing is not None or _are_few(x) or (is_shared and _are_rows_of_one(x))

    def part_of(self, layer: Any, x: mx.array) -> mx.array:
        """The output of `layer` for `x`; the other layers' parts are kept until their calls."""
        if x is not self._input or id(layer) not in self._left:
            multiply = self._multiply if _are_few(x) else _by_mlx
            parts = multiply(x, self._weight, self._bias, self._widths, self._packing)
            self._input = x
            self._left = dict(zip(self._layers, parts, strict=True))
        part = self._left.pop(id(layer))
        if not self._left:
            self._input = None
        return part


_FEW_ROWS: dict[type, type] = {
    layer: type(f"FewRows{layer.__name__}", (mixin, layer), {})
    for layer, mixin in (
        (Linear, _FewRowsLinear),
        (QuantizedLinear, _FewRowsLinear),
        (Embedding, _FewRowsEmbedding),
        (QuantizedEmbedding, _FewRowsEmbedding),
    )
}
"""The class of layers of few rows, by that of MLX's layers."""


def use_few_rows_kernels(
    language_model: Any, multiply: Multiply = linear_kernels.skinny_linear
) -> None:
    """Let the layers of a loaded model take few rows by `multiply`, if they are exactly known."""
    modules = language_model.modules()
    for module in modules:
        if type(module) in _FEW_ROWS and _is_taken(module):
            module.__class__ = _FEW_ROWS[type(module)]
            Product([module], multiply)
    for module in modules:
        for names in _SAME_INPUT:
            layers = [module[name] for name in names if name in module]
            if len(layers) == len(names) and _fit(layers):
                Product(layers, multiply)


def _fit(layers: Sequence[Any]) -> bool:
    """Whether layers can be one product."""
    are_taken = all(isinstance(layer, _FewRowsLinear) for layer in layers)
    return are_taken and len({_sort_of(layer) for layer in layers}) == 1


def _sort_of(layer: Any) -> tuple[object, ...]:
    depth, dtype = layer.weight.shape[1], layer.weight.dtype
    packing = (layer.bits, layer.group_size, layer.scales.dtype) if "scales" in layer else ()
    return depth, dtype, "bias" in layer, *packing


def _is_taken(layer: Any) -> bool:
    """Whether the kernel takes a layer's weights."""
    dtype, depth = layer.weight.dtype, layer.weight.shape[1]
    if "scales" in layer:
        if layer.mode != "affine":
            return False
        dtype, depth = layer.scales.dtype, depth * 32 // layer.bits
        if not Packing(layer.scales, layer.biases, layer.bits, layer.group_size).is_taken:
            return False
    if "bias" in layer and layer.bias.dtype != dtype:
        return False
    return dtype in linear_kernels.DTYPES and depth % linear_kernels.SKINNY_DEPTH == 0


def _are_few(x: mx.array) -> bool:
    return x.size <= linear_kernels.SKINNY_ROWS * x.shape[-1]


def _are_rows_of_one(x: mx.array) -> bool:
    return x.ndim == 3 and x.shape[1] == 1


def _by_mlx(
    x: mx.array,
    weight: mx.array,
    bias: mx.array | None,
    widths: Sequence[int],
    packing: Packing | None = None,
) -> list[mx.array]:
    """See `Multiply`; for any number of rows."""
    if packing is not None:
        weight = mx.dequantize(
            weight,
            packing.scales,
            packing.offsets,
            group_size=packing.group_size,
            bits=packing.bits,
        )
    rows = x.reshape(-1, x.shape[-1])
    product = rows @ weight.T if bias is None else mx.addmm(bias, rows, weight.T)
    product = product.reshape(*x.shape[:-1], -1)
    return list(mx.split(product, list(accumulate(widths[:-1])), axis=-1))
