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


def test_half_precision_attention_is_left_to_mlx_vlm():
    q, k, _ = (each.astype(mx.bfloat16) for each in random_qkv(5, 9))
    assert not CpuAttention().supports(q, k, "causal")


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
