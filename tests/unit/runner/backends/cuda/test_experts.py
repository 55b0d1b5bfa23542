"""Experts give many sorted rows to the kernel, in its form, and keep their outputs."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_vlm.models.switch_layers import SwitchLinear

from tests.support.experts import multiply_by_expert
from vlm_server.runner.backends.cuda.experts import use_expert_kernels
from vlm_server.runner.backends.dequantize import dequantize_for_many_rows


class Multiply:
    """Counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, x: mx.array, *others: Any) -> mx.array:
        self.num_calls += 1
        assert x.ndim == 2
        assert others[2].dtype == mx.uint32
        return multiply_by_expert(x, *others)


def experts_of(dtype: mx.Dtype, bits: int | None, *, bias: bool) -> SwitchLinear:
    mx.random.seed(0)
    experts = SwitchLinear(64, 32, 4, bias=bias)
    if bias:
        experts.bias = mx.random.normal(experts.bias.shape)
    if bits:
        experts = experts.to_quantized(group_size=32, bits=bits)
    experts.set_dtype(dtype)
    return experts


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "num_calls"), [(8, 0), (9, 1), (300, 1)])
def test_kernel_multiplies_many_sorted_rows(bits: int, bias: bool, rows: int, num_calls: int):
    experts, multiply = experts_of(mx.bfloat16, bits, bias=bias), Multiply()
    x = mx.random.normal((rows, 1, 64)).astype(mx.bfloat16)
    chosen = mx.sort(mx.random.randint(0, 4, (rows,)))
    expected = experts(x, chosen, sorted_indices=True)
    use_expert_kernels(experts, multiply)
    found = experts(x, chosen, sorted_indices=True)
    assert multiply.num_calls == num_calls
    assert found.shape == expected.shape
    assert mx.allclose(found, expected, atol=0.05)
    assert mx.allclose(experts(x[::-1], chosen[::-1])[::-1], expected, atol=0.05)
    assert multiply.num_calls == num_calls


def test_kernel_multiplies_rows_of_dense_experts():
    experts, multiply = experts_of(mx.float16, None, bias=True), Multiply()
    x = mx.random.normal((40, 1, 64)).astype(mx.float16)
    chosen = mx.sort(mx.random.randint(0, 4, (40,)))
    use_expert_kernels(experts, multiply)
    found = experts(x, chosen, sorted_indices=True)
    assert multiply.num_calls == 1
    expected = x @ experts.weight[chosen].swapaxes(1, 2) + experts.bias[chosen][:, None]
    assert mx.allclose(found, expected, atol=0.01)


@pytest.mark.parametrize(
    ("dtype", "bits", "mode"),
    [(mx.float32, None, "affine"), (mx.bfloat16, 6, "affine"), (mx.bfloat16, 4, "mxfp4")],
)
def test_kernel_leaves_other_experts_to_mlx(dtype: mx.Dtype, bits: int | None, mode: str):
    layers, multiply = nn.Module(), Multiply()
    layers.experts = experts_of(dtype, None, bias=False)
    if bits:
        layers.experts = layers.experts.to_quantized(group_size=32, bits=bits, mode=mode)
    use_expert_kernels(layers, multiply)
    dequantize_for_many_rows(layers)
    x = mx.random.normal((100, 1, 64)).astype(dtype)
    layers.experts(x, mx.sort(mx.random.randint(0, 4, (100,))), sorted_indices=True)
    assert multiply.num_calls == 0
