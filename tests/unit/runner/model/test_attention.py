"""Our attention is called in mlx-vlm's models only while in place, for causal masks."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import mlx.core as mx
import pytest
from mlx_vlm.models import base, llava, qwen2_vl

from tests.unit.runner.backends.attention_inputs import SCALE, mlx_attention, random_qkv
from vlm_server.runner.backends.cpu import CpuAttention
from vlm_server.runner.model.attention import ModelAttention


def layer_of(module: ModuleType) -> object:
    return type("Layer", (), {"__module__": module.__name__})()


LANGUAGE_MODEL = SimpleNamespace(
    modules=lambda: [layer_of(module) for module in (qwen2_vl.language, llava.vision)]
)


def test_model_attention_replaces_mlx_vlms_only_in_place():
    module = qwen2_vl.language
    q, k, v = random_qkv(5, 9)
    calls = []

    class Watched(CpuAttention):
        def __call__(self, *arguments: object) -> mx.array:
            calls.append(arguments)
            return super().__call__(*arguments)  # type: ignore[arg-type]

    with ModelAttention(LANGUAGE_MODEL, Watched()).in_place():
        assert module.scaled_dot_product_attention is not base.scaled_dot_product_attention
        found = module.scaled_dot_product_attention(q, k, v, cache=None, scale=SCALE, mask="causal")
    assert module.scaled_dot_product_attention is base.scaled_dot_product_attention
    assert len(calls) == 1
    assert mx.allclose(found, mlx_attention(q, k, v, "causal"), atol=1e-5)


@pytest.mark.parametrize("mask", [None, mx.tril(mx.ones((5, 9), dtype=mx.bool_), 4)])
def test_attention_without_plain_causal_mask_is_left_to_mlx_vlm(mask: mx.array | None):
    q, k, v = random_qkv(5, 9)
    with ModelAttention(LANGUAGE_MODEL, CpuAttention()).in_place():
        attend = qwen2_vl.language.scaled_dot_product_attention
        found = attend(q, k, v, cache=None, scale=SCALE, mask=mask)
    assert (found == mlx_attention(q, k, v, mask)).all()


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_attention_is_computed_in_float32(dtype: mx.Dtype):
    halves = [each.astype(dtype) for each in random_qkv(5, 9)]
    assert CpuAttention().supports(*halves[:2], "causal")
    found = CpuAttention()(*halves, SCALE, "causal")
    expected = mlx_attention(*(each.astype(mx.float32) for each in halves), "causal")
    assert found.dtype == dtype
    assert (found == expected.astype(dtype)).mean() > 0.99
    assert mx.allclose(found.astype(mx.float32), expected, rtol=0.01, atol=1e-3)


def test_attention_in_half_precision_takes_bounded_memory():
    """The scores of a long chunk take several times as much as all keys and values."""
    q, k, v = (mx.ones((1, 2, count, 64), mx.bfloat16) for count in (2048, 8192, 8192))
    mx.eval(q, k, v)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(CpuAttention()(q, k, v, SCALE, "causal"))
    num_scores = 2 * 2048 * 8192
    assert mx.get_peak_memory() - before < 2 * num_scores


def test_attention_sinks_are_left_to_mlx_vlm():
    q, k, v = random_qkv(5, 9)
    sinks = mx.zeros(8)
    with ModelAttention(LANGUAGE_MODEL, CpuAttention()).in_place():
        attend = qwen2_vl.language.scaled_dot_product_attention
        found = attend(q, k, v, cache=None, scale=SCALE, mask="causal", sinks=sinks)
    expected = mx.fast.scaled_dot_product_attention(
        q, k, v, scale=SCALE, mask="causal", sinks=sinks
    )
    assert (found == expected).all()
