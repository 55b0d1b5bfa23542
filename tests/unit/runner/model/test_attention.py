"""mlx-vlm's language models call our attention for a while, and it takes what it should."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import mlx.core as mx
import pytest
from mlx_vlm.models import base, llava, qwen2_vl

from tests.active_memory import active_bytes
from tests.unit.runner.backends.test_cpu_attention import SCALE, drawn, theirs
from vlm_server.runner.backends.cuda.attention import CudaAttention
from vlm_server.runner.device.device import Device, DeviceKind
from vlm_server.runner.model import attention
from vlm_server.runner.model.attention import (
    CpuAttention,
    MetalAttention,
    ModelAttention,
    attention_on,
)


def layer_of(module: ModuleType) -> object:
    return type("Layer", (), {"__module__": module.__name__})()


LANGUAGE_MODEL = SimpleNamespace(
    modules=lambda: [layer_of(module) for module in (qwen2_vl.language, llava.vision)]
)


def test_layers_call_it_for_a_while():
    module = qwen2_vl.language
    q, k, v = drawn(5, 9)
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
    assert mx.allclose(found, theirs(q, k, v, "causal"), atol=1e-5)


@pytest.mark.parametrize("mask", [None, mx.tril(mx.ones((5, 9), dtype=mx.bool_), 4)])
def test_what_is_not_plainly_causal_is_left_to_mlx_vlm(mask: mx.array | None):
    q, k, v = drawn(5, 9)
    with ModelAttention(LANGUAGE_MODEL, CpuAttention()).in_place():
        attend = qwen2_vl.language.scaled_dot_product_attention
        found = attend(q, k, v, cache=None, scale=SCALE, mask=mask)
    assert (found == theirs(q, k, v, mask)).all()


def test_half_precision_is_left_to_mlx_vlm():
    q, k, _ = (each.astype(mx.bfloat16) for each in drawn(5, 9))
    assert not CpuAttention().takes(q, k, "causal")


def test_sinks_are_left_to_mlx_vlm():
    q, k, v = drawn(5, 9)
    sinks = mx.zeros(8)
    with ModelAttention(LANGUAGE_MODEL, CpuAttention()).in_place():
        attend = qwen2_vl.language.scaled_dot_product_attention
        found = attend(q, k, v, cache=None, scale=SCALE, mask="causal", sinks=sinks)
    expected = mx.fast.scaled_dot_product_attention(
        q, k, v, scale=SCALE, mask="causal", sinks=sinks
    )
    assert (found == expected).all()


def test_each_device_has_its_own():
    def on(kind: DeviceKind) -> object:
        return type(attention_on(Device(kind, "it", 1, 1), 4096))

    assert on(DeviceKind.CPU) is CpuAttention
    assert on(DeviceKind.CUDA) is CudaAttention
    assert on(DeviceKind.METAL) is MetalAttention


@pytest.mark.parametrize("head_size", [48, 192, 256, 512])
@pytest.mark.parametrize("mask", ["causal", None, "array", "row"])
def test_blocks_of_queries_attend_as_all_do(
    monkeypatch: pytest.MonkeyPatch, head_size: int, mask: str | None
):
    monkeypatch.setattr(attention, "_MOST_SCORE_BYTES", 1)
    q, k, v = (
        mx.random.normal((2, heads, n, head_size)) for heads, n in ((4, 50), (2, 70), (2, 70))
    )
    given: attention.Mask = mask
    if mask == "array":
        given = mx.random.uniform(shape=(2, 1, 50, 70)) > 0.3
    elif mask == "row":
        given = mx.random.uniform(shape=(1, 1, 1, 70)) > 0.3
    blocks = MetalAttention()
    assert blocks.takes(q, k, given)
    found = blocks(q, k, v, 0.1, given)
    assert mx.allclose(found, theirs(q * (0.1 / SCALE), k, v, given), atol=1e-5)


def test_metal_fuses_the_usual_head_sizes_and_few_queries():
    many, few, keys = mx.zeros((1, 8, 2048, 256)), mx.zeros((1, 8, 8, 256)), (1, 2, 1 << 17)
    assert MetalAttention().takes(many, mx.zeros((*keys, 256)), "causal")
    assert not MetalAttention().takes(few, mx.zeros((*keys, 256)), "causal")
    fused = mx.zeros((1, 8, 2048, 128))
    assert not MetalAttention().takes(fused, mx.zeros((*keys, 128)), "causal")


def test_scores_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch):
    """All at once they take 32 MiB, and more for what is made of them: 41."""
    monkeypatch.setattr(attention, "_MOST_SCORE_BYTES", 1 << 19)
    q, k = mx.zeros((1, 8, 512, 256)), mx.zeros((1, 1, 2048, 256))
    mx.eval(q, k)
    before = active_bytes()
    mx.reset_peak_memory()
    mx.eval(MetalAttention()(q, k, k, 0.1, "causal"))
    assert mx.get_peak_memory() - before < 32 << 20
