"""Simplified operations of a loaded model have the results of mlx-vlm's."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import mlx_vlm
import numpy as np
import pytest
from mlx.nn.layers import activations

from tests.integration.harness import Load
from vlm_server.runner.model.simplify import gelu_approx

MLX_GELU = activations.gelu_approx
IDS = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])


def test_norms_by_weight_plus_one_become_plain(load_tiny: Load):
    loaded, _ = load_tiny("gemma3")
    norms = [m for m in loaded.language_model.modules() if type(m).__name__.endswith("Norm")]
    assert norms
    assert {type(norm) for norm in norms} == {nn.RMSNorm}
    original = mlx_vlm.load(str(loaded.checkpoint.folder))[0].language_model
    expected = original.model.layers[0].input_layernorm.weight + 1.0
    assert mx.array_equal(loaded.language_model.layers[0].input_layernorm.weight, expected)


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "qwen3_5"])
def test_simplified_model_computes_equal_logits(load_tiny: Load, family: str):
    loaded, _ = load_tiny(family)
    original = mlx_vlm.load(str(loaded.checkpoint.folder))[0].language_model
    logits = [np.array(model(IDS).logits) for model in (original, loaded.language_model)]
    np.testing.assert_allclose(logits[0][:, -1], logits[1][:, -1], atol=2e-5)


def test_factor_of_layer_becomes_vector(load_tiny: Load):
    loaded, _ = load_tiny("gemma4")
    layers = loaded.language_model.model.layers
    assert layers
    for layer in layers:
        assert layer.layer_scalar.shape == layer.input_layernorm.weight.shape
        assert mx.all(layer.layer_scalar == layer.layer_scalar[0])


@pytest.mark.parametrize(("dtype", "distance"), [(mx.float32, 1e-6), (mx.bfloat16, 0.04)])
def test_gelu_equals_one_of_mlx(dtype: mx.Dtype, distance: float):
    x = mx.linspace(-6, 6, 4001).astype(dtype)
    outputs = gelu_approx(x), MLX_GELU(x)
    assert outputs[0].dtype == dtype
    assert mx.abs(outputs[0] - outputs[1]).max().item() <= distance


def test_models_take_gelu_without_power(load_tiny: Load):
    load_tiny("gemma3")
    assert nn.gelu_approx is activations.gelu_approx is gelu_approx
