"""Linear layers that take the rows of a decode step by our own kernel, on CUDA.

MLX multiplies more than one row, or one with a bias, by cuBLAS; recording that takes the host
longer than most of the products take. Layers with the same input are one product: queries, keys
and values, or both halves of an MLP; in mixed steps, too, which are too large for our kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
from mlx.nn import Embedding, Linear  # type: ignore[attr-defined]  # mlx.nn is not typed

from vlm_server.runner.backends.cuda import kernels

_DTYPES = (mx.bfloat16, mx.float16)
_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that mlx-vlm's modules call with one input."""


Multiply = Callable[[mx.array, mx.array, mx.array | None, Sequence[int]], list[mx.array]]
"""`x @ weight.T + bias`, (..., columns), in parts of such widths: see `skinny_linear`."""


class FewRowsLinear(Linear):  # type: ignore[misc]
    """A `Linear` whose weights `skinny_linear` takes."""

    multiply: Multiply
    product: SharedProduct | None = None
    """The shared product that computes this layer, if any."""

    def __call__(self, x: mx.array) -> mx.array:
        are_few = _are_few(x, self.weight)
        if self.product is not None and (are_few or _are_rows_of_one(x, self.weight)):
            return self.product.part_of(self, x)
        if are_few:
            return self.multiply(x, self.weight, self.get("bias"), self.weight.shape[:1])[0]
        return super().__call__(x)  # type: ignore[no-any-return]


class FewRowsEmbedding(Embedding):  # type: ignore[misc]
    """An `Embedding` that may be the lm_head, too."""

    multiply: Multiply

    def as_linear(self, x: mx.array) -> mx.array:
        if _are_few(x, self.weight):
            return self.multiply(x, self.weight, None, self.weight.shape[:1])[0]
        return super().as_linear(x)  # type: ignore[no-any-return]


class SharedProduct:
    """One product for several layers, whose weights become views of its own."""

    def __init__(self, layers: Sequence[FewRowsLinear], multiply: Multiply) -> None:
        self._multiply = multiply
        self._weight = mx.concatenate([layer.weight for layer in layers])
        biases = [layer.bias for layer in layers if "bias" in layer]
        self._bias = mx.concatenate(biases) if biases else None
        self._widths = [layer.weight.shape[0] for layer in layers]
        self._layers = [id(layer) for layer in layers]
        parts = mx.split(self._weight, list(accumulate(self._widths[:-1])))
        for layer, part in zip(layers, parts, strict=True):
            layer.weight = part
            layer.product = self
        mx.eval(self._weight, self._bias, parts)
        self._input: mx.array | None = None
        self._left: dict[int, mx.array] = {}
        """Parts of `_input` that no layer has asked for yet."""

    def part_of(self, layer: FewRowsLinear, x: mx.array) -> mx.array:
        """The output of `layer` for `x`; the other layers' parts are kept until their calls."""
        if x is not self._input or id(layer) not in self._left:
            multiply = self._multiply if _are_few(x, self._weight) else _by_mlx
            parts = multiply(x, self._weight, self._bias, self._widths)
            self._input = x
            self._left = dict(zip(self._layers, parts, strict=True))
        part = self._left.pop(id(layer))
        if not self._left:
            self._input = None
        return part


_FEW_ROWS: dict[type, type] = {Linear: FewRowsLinear, Embedding: FewRowsEmbedding}


def use_few_rows_kernels(language_model: Any, multiply: Multiply = kernels.skinny_linear) -> None:
    """Let the layers of a loaded model take few rows by `multiply`, if they are exactly known."""
    modules = language_model.modules()
    for module in modules:
        if type(module) in _FEW_ROWS and _is_taken(module):
            module.__class__ = _FEW_ROWS[type(module)]
            module.multiply = multiply
    for module in modules:
        for names in _SAME_INPUT:
            layers = [module[name] for name in names if name in module]
            if len(layers) == len(names) and _fit(layers):
                SharedProduct(layers, multiply)


def _fit(layers: Sequence[Any]) -> bool:
    """Whether layers can be one product."""
    if any(type(layer) is not FewRowsLinear for layer in layers):
        return False
    kinds = {(layer.weight.shape[1], layer.weight.dtype, "bias" in layer) for layer in layers}
    return len(kinds) == 1


def _is_taken(layer: Any) -> bool:
    """Whether the kernel takes a layer's weights."""
    dtype, depth = layer.weight.dtype, layer.weight.shape[1]
    if "bias" in layer and layer.bias.dtype != dtype:
        return False
    return dtype in _DTYPES and depth % kernels.SKINNY_DEPTH == 0


def _are_few(x: mx.array, weight: mx.array) -> bool:
    return x.size <= kernels.SKINNY_ROWS * x.shape[-1] and x.dtype == weight.dtype


def _are_rows_of_one(x: mx.array, weight: mx.array) -> bool:
    return x.ndim == 3 and x.shape[1] == 1 and x.dtype == weight.dtype


def _by_mlx(
    x: mx.array, weight: mx.array, bias: mx.array | None, widths: Sequence[int]
) -> list[mx.array]:
    rows = x.reshape(-1, x.shape[-1])
    product = rows @ weight.T if bias is None else mx.addmm(bias, rows, weight.T)
    product = product.reshape(*x.shape[:-1], -1)
    return list(mx.split(product, list(accumulate(widths[:-1])), axis=-1))
