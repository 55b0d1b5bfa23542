"""One M-RoPE embedding for all layers equals mlx-vlm's and keeps no memory."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import mlx.core as mx
import mlx_vlm
import pytest
from mlx_vlm.models import rope_utils
from mlx_vlm.models.rope_utils import MRoPERotaryEmbedding

from tests.integration.harness import load_model
from tests.tiny_models.fixtures import TinyModel
from vlm_server.runner.model.mrope import (
    DecodePositions,
    SharedMRope,
    use_shared_mrope,
)

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"]
HEAD = 64


@pytest.mark.parametrize("family", FAMILIES)
def test_mrope_layers_share_one_rotary_embedding(tiny_model: TinyModel, family: str):
    loaded = load_model(tiny_model(family))
    assert loaded.decode_positions is DecodePositions.ONE
    attentions = [getattr(layer, "self_attn", None) for layer in loaded.language_model.layers]
    assert len({id(each.rotary_emb) for each in attentions if each is not None}) == 1


def test_metal_mrope_kernel_is_replaced(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch):
    """mlx-vlm's fused kernel is compiled for each shape, too."""
    monkeypatch.setattr(rope_utils, "_HAS_METAL", True)
    model, _ = mlx_vlm.load(str(tiny_model("qwen2_5_vl")))
    assert model.language_model.layers[0].self_attn.rotary_emb.fused_apply
    assert use_shared_mrope(model.language_model) is DecodePositions.ONE


def test_families_without_mrope_keep_their_rotary_embedding(tiny_model: TinyModel):
    model, _ = mlx_vlm.load(str(tiny_model("gemma3")))
    assert use_shared_mrope(model.language_model) is DecodePositions.THREE
    assert load_model(tiny_model("gemma3")).decode_positions is DecodePositions.NONE


# ---- rotation, and memory that stays -----------------------------------------------


def embedding(style: str, rotated: int = HEAD) -> Any:
    half = rotated // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3]
    return MRoPERotaryEmbedding(rotated, base=1e4, mrope_section=sections, style=style)


def shared_mrope(own: Any, num_layers: int = 1) -> SharedMRope:
    return SharedMRope(own, num_layers)


def inputs(tokens: int, rows: int = 1, dtype: Any = mx.float32) -> tuple[Any, Any, Any]:
    """Queries, keys and positions of so many tokens."""
    q = mx.random.normal((rows, 4, tokens, HEAD)).astype(dtype)
    k = mx.random.normal((rows, 1, tokens, HEAD)).astype(dtype)
    return q, k, mx.random.randint(0, 500, (3, rows, tokens))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("rotated", [HEAD, HEAD // 4])
@pytest.mark.parametrize("style", ["chunked", "interleaved"])
def test_shared_mrope_rotates_as_mlx_vlm(style: str, rotated: int, dtype: Any):
    own = embedding(style, rotated)
    for tokens, rows in [(7, 1), (33, 1), (1, 3), (5, 2)]:  # compiled at the first, once
        q, k, positions = inputs(tokens, rows, dtype)
        found = shared_mrope(own).apply_rotary(q, k, positions)
        for mine, theirs in zip(found, own.apply_rotary(q, k, positions), strict=True):
            assert mine.dtype == dtype
            size = mx.abs(theirs).max()
            assert mx.abs(mine - theirs).max() <= 4 * size * mx.finfo(dtype).eps


def test_mrope_kernel_gets_angles_of_all_layers():
    calls = []

    def rotate(*arguments: mx.array) -> tuple[mx.array, mx.array]:
        calls.append(arguments)
        return arguments[0], arguments[1]

    q, k, positions = inputs(5, rows=2)
    rotary = SharedMRope(embedding("interleaved", HEAD // 2), 2, rotate)
    for _ in range(2):
        assert rotary.apply_rotary(q, k, positions) == (q, k)
    assert len(calls) == 2
    for cosines, sines in (call[2:] for call in calls):
        assert cosines is calls[0][2]
        assert cosines.shape == sines.shape == (2, 1, 5, HEAD // 4)
        assert mx.allclose(cosines**2 + sines**2, mx.ones(1))


@pytest.mark.parametrize("rows", [1, 3])
def test_text_token_has_one_mrope_position(rows: int):
    own = embedding("interleaved")
    q, k, _ = inputs(1, rows)
    positions = mx.array([[7 + 100 * row] for row in range(rows)])
    rotary = SharedMRope(own, 1)
    found = rotary.apply_rotary(q, k, positions)
    wanted = own.apply_rotary(q, k, mx.broadcast_to(positions, (3, rows, 1)))
    for mine, theirs in zip(found, wanted, strict=True):
        assert mx.abs(mine - theirs).max() < 1e-4


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc what is in use")
def test_new_prompt_lengths_leave_no_mrope_memory():
    rotary = shared_mrope(embedding("interleaved"))
    apply(rotary, range(1, 50))
    before = heap_bytes()
    apply(rotary, range(50, 150))
    assert heap_bytes() - before < 100 * 1000


def test_mrope_positions_are_dropped_after_last_layer():
    rotary = shared_mrope(embedding("interleaved"), num_layers=2)
    q, k, positions = inputs(1000)
    apply_layer(rotary, q, k, positions)
    apply_layer(rotary, q, k, positions)
    with_inputs = mx.get_active_memory()
    apply_layer(rotary, q, k, positions)
    assert mx.get_active_memory() > with_inputs, "computed for two layers"
    apply_layer(rotary, q, k, positions)
    assert mx.get_active_memory() == with_inputs


def apply_layer(rotary: SharedMRope, q: mx.array, k: mx.array, positions: mx.array) -> None:
    mx.eval(rotary.apply_rotary(q, k, positions))
    mx.synchronize()  # a GPU gives back what a step took when the step is over


def apply(rotary: SharedMRope, lengths: range) -> None:
    for length in lengths:
        mx.eval(rotary.apply_rotary(*inputs(length)))


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc's <malloc.h>."""

    _fields_ = (
        ("before", ctypes.c_size_t * 7),
        ("uordblks", ctypes.c_size_t),
        ("after", ctypes.c_size_t * 2),
    )


def heap_bytes() -> int:
    """Bytes in use on the C library's heap, without MLX's pool."""
    mx.synchronize()
    mx.clear_cache()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo
    return int(mallinfo2().uordblks)
