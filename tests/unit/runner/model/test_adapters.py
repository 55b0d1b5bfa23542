"""Products with adapters, row by row, in all classes and layouts that layers have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn import Linear, Module, QuantizedLinear  # type: ignore[attr-defined]

from vlm_server.runner.backends.cuda.few_rows import use_few_rows_kernels
from vlm_server.runner.backends.dequantize import dequantize_for_many_rows
from vlm_server.runner.model.adapters import (
    Adapter,
    LayerDelta,
    adapters_of_rows,
    applied,
    attach,
    chosen,
    chosen_part,
)

RANKS = (4, 8)


def attached(layer: Any, inputs: int = 64, outputs: int = 32) -> list[LayerDelta]:
    """Attach two adapters of different ranks."""
    dtype = layer.scales.dtype if "scales" in layer else layer.weight.dtype
    deltas = [
        LayerDelta(
            "layer",
            layer,
            (mx.random.normal((inputs, rank), key=mx.random.key(rank)) / 8).astype(dtype),
            mx.random.normal((rank, outputs), key=mx.random.key(2 * rank)).astype(dtype),
        )
        for rank in RANKS
    ]
    attach([Adapter(str(n), "", (delta,)) for n, delta in enumerate(deltas)])
    return deltas


def expected(x: mx.array, y: mx.array, deltas: Sequence[LayerDelta], numbers: Sequence[int]) -> Any:
    rows = [
        y[row] if not number else y[row] + x[row] @ deltas[number - 1].a @ deltas[number - 1].b
        for row, number in enumerate(numbers)
    ]
    return mx.stack(rows)


@pytest.mark.parametrize("kind", ["dense", "quantized", "dequantizing"])
@pytest.mark.parametrize("width", [1, 5])
def test_row_gets_product_of_its_own_adapter(kind: str, width: int):
    layer: Any = Linear(64, 32)
    if kind != "dense":
        layer = QuantizedLinear.from_linear(layer, group_size=32, bits=4)
    if kind == "dequantizing":
        holder = Module()
        holder.layer = layer
        dequantize_for_many_rows(holder)
    x = mx.random.normal((4, width, 64))
    plain = layer(x)
    deltas = attached(layer)
    numbers = [2, 0, 1, 2]
    with applied({"x": x} | adapters_of_rows(numbers)) as others:
        assert list(others) == ["x"]
        output, flat = layer(x), layer(x.reshape(-1, 64))
    assert mx.allclose(output, expected(x, plain, deltas, numbers), atol=1e-4)
    assert mx.array_equal(output[1], plain[1]), "the base's row is exactly its own"
    assert mx.allclose(flat.reshape(output.shape), output, atol=1e-5)
    assert mx.array_equal(layer(x), plain), "and so is what no adapter was chosen for"


def test_row_of_base_is_finite_beside_adapter_that_overflows():
    layer = Linear(64, 32)
    attached(layer)
    x = mx.full((2, 1, 64), 1e38)
    plain = layer(x / 1e38)
    with chosen(mx.array([[0], [2]])):
        output = layer(mx.concatenate([x[:1] / 1e38, x[1:]]))
    assert mx.array_equal(output[0], plain[0])


def test_part_of_rows_is_all_rows_of_inner_call():
    layer = Linear(64, 32)
    deltas = attached(layer)
    x = mx.random.normal((1, 6, 64))
    plain = layer(x)
    with chosen(mx.array([[0], [1], [1]])), chosen_part(1, 2):
        assert mx.allclose(layer(x), expected(x, plain, deltas, [1]), atol=1e-4)


def test_layers_of_one_product_add_their_own_adapters():
    attention: Any = Module()
    for name in ("q_proj", "k_proj", "v_proj"):
        layer = Linear(64, 32, bias=False)
        layer.set_dtype(mx.bfloat16)
        setattr(attention, name, layer)

    def multiply(x: Any, weight: Any, bias: Any, widths: Sequence[int], packing: Any) -> list[Any]:
        ends = [sum(widths[: n + 1]) for n in range(len(widths) - 1)]
        return list(mx.split(x @ weight.T, ends, axis=-1))

    use_few_rows_kernels(attention, multiply)
    x = mx.random.normal((3, 1, 64)).astype(mx.bfloat16)
    plain = [attention[name](x) for name in ("q_proj", "k_proj", "v_proj")]
    deltas = attached(attention.q_proj)
    with chosen(mx.array([[1], [0], [2]])):
        q, k, v = (attention[name](x) for name in ("q_proj", "k_proj", "v_proj"))
    assert mx.allclose(q, expected(x, plain[0], deltas, [1, 0, 2]), atol=0.1)
    assert mx.array_equal(k, plain[1])
    assert mx.array_equal(v, plain[2])


def test_rows_of_base_alone_have_no_input():
    assert adapters_of_rows([0, 0]) == {}
    assert adapters_of_rows([0, 2])["adapters"].tolist() == [[0], [2]]
