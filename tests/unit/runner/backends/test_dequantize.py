"""Quantized layers become dense ones where memory is ample, and multiply alike."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx import nn
from mlx_vlm.models.switch_layers import SwitchLinear

from vlm_server.runner.backends.dequantize import (
    DequantizingLinear,
    DequantizingSwitchLinear,
    dequantize,
)

AMPLE = 1 << 30


class Layers(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 32)
        self.embedding = nn.Embedding(50, 64)
        self.experts = SwitchLinear(64, 32, 4, bias=False)


def outputs(layers: Layers, x: mx.array) -> list[mx.array]:
    chosen = mx.arange(len(x))[:, None] % 4
    return [
        layers.linear(x),
        layers.embedding(mx.array([3, 49])),
        layers.embedding.as_linear(x),
        layers.experts(x[:, :, None], chosen),
    ]


def quantized_layers(mode: str = "affine") -> Layers:
    mx.random.seed(0)
    layers = Layers()
    nn.quantize(layers, group_size=32, bits=4, mode=mode)
    return layers


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("free_bytes", [0, AMPLE])
def test_dequantized_layers_keep_their_outputs(rows: int, free_bytes: int):
    layers, x = quantized_layers(), mx.random.normal((rows, 1, 64))
    expected = outputs(layers, x)
    dequantize(layers, free_bytes)
    for found, wanted in zip(outputs(layers, x), expected, strict=True):
        assert found.shape == wanted.shape
        assert mx.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [56, 57, 300])
def test_experts_multiply_many_sorted_rows_dequantized(
    rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch
):
    mx.random.seed(1)
    experts = SwitchLinear(64, 32, 4, bias=bias)
    if bias:
        experts.bias = mx.random.normal(experts.bias.shape)
    experts = experts.to_quantized(group_size=32, bits=4)
    x, chosen = mx.random.normal((rows, 1, 64)), mx.sort(mx.random.randint(0, 4, (rows,)))
    expected = experts(x, chosen, sorted_indices=True)
    dequantize(experts, 0)
    dequantized = []
    dense = mx.dequantize

    def count(*args: object, **kwargs: object) -> mx.array:
        dequantized.append(args)
        return dense(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(mx, "dequantize", count)
    found = experts(x, chosen, sorted_indices=True)
    assert len(dequantized) == (rows > 14 * 4)
    assert found.shape == expected.shape
    assert mx.allclose(found, expected, atol=1e-5)
    unsorted = experts(x[::-1], chosen[::-1])
    assert mx.allclose(unsorted[::-1], expected, atol=1e-5)


def test_ample_memory_makes_all_layers_dense():
    layers = quantized_layers()
    dequantize(layers, AMPLE)
    kinds = [type(layer) for layer in (layers.linear, layers.embedding, layers.experts)]
    assert kinds == [nn.Linear, nn.Embedding, SwitchLinear]
    assert "scales" not in layers.linear
    assert not hasattr(layers.linear, "bits")


def test_dense_layers_take_half_of_free_bytes_at_most():
    dense = 4 * (64 * 32 + 50 * 64 + 4 * 64 * 32)
    packed = dense // 8 + dense // 4 // 32 * 8  # and a scale and an offset for 32 numbers
    layers = quantized_layers()
    dequantize(layers, 2 * (dense - packed) - 1)
    assert type(layers.linear) is DequantizingLinear
    assert type(layers.experts) is DequantizingSwitchLinear
    layers = quantized_layers()
    dequantize(layers, 2 * (dense - packed))
    assert type(layers.linear) is nn.Linear


def test_non_affine_quantization_is_not_dequantized():
    layers = quantized_layers("mxfp4")
    dequantize(layers, AMPLE)
    assert type(layers.linear) is nn.QuantizedLinear
