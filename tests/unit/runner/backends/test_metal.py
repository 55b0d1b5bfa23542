"""Metal's attention in blocks, and the choice of a backend."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.support.active_memory import active_bytes
from tests.unit.runner.backends.attention_inputs import SCALE, mlx_attention
from vlm_server.runner.backends import backend_of, metal
from vlm_server.runner.backends.cpu import CpuAttention
from vlm_server.runner.backends.cuda.attention import CudaAttention
from vlm_server.runner.backends.interface import Mask
from vlm_server.runner.backends.metal import MetalAttention
from vlm_server.runner.device.device import Device, DeviceKind


def test_device_kinds_select_their_attention():
    def on(kind: DeviceKind) -> object:
        return type(backend_of(Device(kind, "it", 1, 1)).attention(4096))

    assert on(DeviceKind.CPU) is CpuAttention
    assert on(DeviceKind.CUDA) is CudaAttention
    assert on(DeviceKind.METAL) is MetalAttention


@pytest.mark.parametrize("head_size", [48, 192, 256, 512])
@pytest.mark.parametrize("mask", ["causal", None, "array", "row"])
def test_metal_query_blocks_attend_as_all_queries(
    monkeypatch: pytest.MonkeyPatch, head_size: int, mask: str | None
):
    monkeypatch.setattr(metal, "_MAX_SCORE_BYTES", 1)
    q, k, v = (
        mx.random.normal((2, heads, n, head_size)) for heads, n in ((4, 50), (2, 70), (2, 70))
    )
    given: Mask = mask
    if mask == "array":
        given = mx.random.uniform(shape=(2, 1, 50, 70)) > 0.3
    elif mask == "row":
        given = mx.random.uniform(shape=(1, 1, 1, 70)) > 0.3
    blocks = MetalAttention()
    assert blocks.supports(q, k, given)
    found = blocks(q, k, v, 0.1, given)
    assert mx.allclose(found, mlx_attention(q * (0.1 / SCALE), k, v, given), atol=1e-5)


def test_metal_fuses_usual_head_sizes_and_few_queries():
    many, few, keys = mx.zeros((1, 8, 2048, 256)), mx.zeros((1, 8, 8, 256)), (1, 2, 1 << 17)
    assert MetalAttention().supports(many, mx.zeros((*keys, 256)), "causal")
    assert not MetalAttention().supports(few, mx.zeros((*keys, 256)), "causal")
    fused = mx.zeros((1, 8, 2048, 128))
    assert not MetalAttention().supports(fused, mx.zeros((*keys, 128)), "causal")


def test_attention_scores_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch):
    """The scores of all queries would take 32 MiB, and 41 MiB with temporary arrays."""
    monkeypatch.setattr(metal, "_MAX_SCORE_BYTES", 1 << 19)
    q, k = mx.zeros((1, 8, 512, 256)), mx.zeros((1, 1, 2048, 256))
    mx.eval(q, k)
    before = active_bytes()
    mx.reset_peak_memory()
    mx.eval(MetalAttention()(q, k, k, 0.1, "causal"))
    assert mx.get_peak_memory() - before < 32 << 20
