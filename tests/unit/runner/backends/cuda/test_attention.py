"""CUDA attention equals MLX's, and its shapes are planned while the device is idle."""

from __future__ import annotations

from random import Random

import mlx.core as mx
import pytest

from tests.unit.runner.backends.attention_inputs import (
    SCALE,
    max_distance,
    mlx_attention,
    random_qkv,
)
from vlm_server.runner.backends.cuda import attention as cuda_attention
from vlm_server.runner.backends.cuda.attention import (
    BLOCK_TOKENS,
    CudaAttention,
    Shape,
    causal_attention,
    masked_attention,
    num_kept_plans,
)
from vlm_server.runner.model.chunks import PaddedChunk


@pytest.mark.parametrize("blocks", [[32] * 6, [128, 64], [192]])
@pytest.mark.parametrize("keys", [192, 256, 1000])
@pytest.mark.parametrize("shared", [1, 4, 8])
def test_cuda_attention_blocks_equal_mlxs_attention(blocks: list[int], keys: int, shared: int):
    q, k, v = random_qkv(192, keys, shared=shared)
    assert (
        max_distance(causal_attention(q, k, v, SCALE, blocks), mlx_attention(q, k, v, "causal"))
        < 1e-5
    )


def test_transposed_queries_equal_contiguous_queries():
    q, k, v = random_qkv(64, 96)
    turned = mx.contiguous(q.swapaxes(1, 2)).swapaxes(1, 2)
    found = causal_attention(turned, k, v, SCALE, [32, 32])
    assert max_distance(found, mlx_attention(q, k, v, "causal")) < 1e-5


@pytest.mark.parametrize(("rows", "mask_rows"), [(1, 1), (3, 3), (3, 1)])
@pytest.mark.parametrize("queries", [1, 5, 16])
@pytest.mark.parametrize("shared", [1, 4])
def test_masked_cuda_attention_equals_mlxs(rows: int, mask_rows: int, queries: int, shared: int):
    q, k, v = random_qkv(queries, 50, rows=rows, shared=shared)
    mask = mx.random.uniform(shape=(mask_rows, 1, queries, 50), key=mx.random.key(9)) > 0.5
    mask[..., 0] = True
    assert max_distance(masked_attention(q, k, v, SCALE, mask), mlx_attention(q, k, v, mask)) < 1e-5


def halves(queries: int, keys: int, *, rows: int = 1) -> tuple[mx.array, mx.array, mx.array]:
    q, k, v = (each.astype(mx.bfloat16) for each in random_qkv(queries, keys, rows=rows))
    return q, k, v


def test_cuda_attention_supports_causal_blocks_and_few_query_masks():
    attention = CudaAttention(4096)
    q, k, _ = halves(256, 512)
    few = mx.ones((1, 1, 16, 512), dtype=mx.bool_)
    assert attention.supports(q, k, "causal")
    assert attention.supports(q[:, :, :16], k, few)
    assert not attention.supports(q, k, None)
    assert not attention.supports(q[:, :, :100], k, "causal")
    assert not attention.supports(q, k[:, :, :500], "causal")
    assert attention.supports(*halves(256, 512, rows=2)[:2], "causal")
    assert not attention.supports(*halves(256, 40_960, rows=2)[:2], "causal")
    assert not attention.supports(q, k, mx.ones((1, 1, 256, 512), dtype=mx.bool_))
    assert not attention.supports(q[:, :, :16], k, few.astype(mx.bfloat16))
    assert not attention.supports(q.astype(mx.float32), k.astype(mx.float32), "causal")


class Planned:
    """A fake of cuDNN's plans: each shape is planned when it is first used."""

    def __init__(self) -> None:
        self.shapes = set[Shape]()
        self.new = 0

    def attend(self, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        self.meet((q.shape[2], k.shape[2]))
        return mx.zeros((*q.shape[:3], v.shape[3]), q.dtype)

    def plan(self, heads: object, shape: Shape) -> mx.array:
        """Record a shape that is planned ahead; computes nothing."""
        self.meet(shape)
        return mx.zeros(())

    def meet(self, shape: Shape) -> None:
        self.new += shape not in self.shapes
        self.shapes.add(shape)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Planned:
    made = Planned()
    monkeypatch.setattr(cuda_attention, "_whole", made.attend)
    monkeypatch.setattr(cuda_attention, "_attend_random", made.plan)
    monkeypatch.setattr(cuda_attention, "_is_correct", lambda heads: True)
    return made


def plan_all(attention: CudaAttention) -> None:
    while attention.precompile_next():
        pass


def attend(attention: CudaAttention, queries: int, keys: int) -> None:
    q = mx.zeros((1, 2, queries, 8), mx.bfloat16)
    k = mx.zeros((1, 1, keys, 8), mx.bfloat16)
    assert attention.supports(q, k, "causal")
    assert attention(q, k, k, SCALE, "causal").shape == q.shape


def shapes_of_a_conversation(random: Random) -> list[Shape]:
    """25 turns of a screenshot each, of which all but the new is cached."""
    num_tokens, cached, shapes = random.randrange(200, 700), 0, []
    for _ in range(25):
        num_tokens += random.randrange(300, 700)
        chunk = PaddedChunk.around(cached, num_tokens, BLOCK_TOKENS)
        shapes.append((chunk.last - chunk.first, chunk.last))
        cached = num_tokens
        num_tokens += random.randrange(8, 40)
    return shapes


def test_planned_conversation_shapes_need_no_new_plans(planned: Planned):
    attention, random = CudaAttention(16384, 1024), Random(1)
    attend(attention, 256, 256)
    plan_all(attention)
    assert planned.new == 64 + 63 + 61, "three blocks for each length that they fit into"
    for _ in range(3):
        for shape in shapes_of_a_conversation(random):
            attend(attention, *shape)
    assert planned.new == 64 + 63 + 61


def test_unseen_chunk_shape_is_attended_in_few_blocks(planned: Planned):
    attention = CudaAttention(4096)
    attend(attention, 256, 256)
    plan_all(attention)
    planned.shapes.clear()
    attend(attention, 1792, 3072)
    assert planned.shapes == {(1024, 2304), (512, 2816), (256, 3072)}


@pytest.mark.parametrize(("told", "kept"), [(None, 256), ("1024", 1024), ("many", 256)])
def test_planned_shapes_stay_within_mlxs_plan_cache(
    told: str | None, kept: int, planned: Planned, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("MLX_CUDA_SDPA_CACHE_SIZE", raising=False)
    if told is not None:
        monkeypatch.setenv("MLX_CUDA_SDPA_CACHE_SIZE", told)
    assert num_kept_plans() == kept
    attention = CudaAttention(1 << 20, num_kept_plans())
    attend(attention, 256, 256)
    plan_all(attention)
    assert len(planned.shapes) <= kept - 128


def test_seen_chunk_shape_is_attended_whole_once_planned(planned: Planned):
    attention = CudaAttention(4096)
    attend(attention, 256, 256)
    plan_all(attention)
    attend(attention, 768, 1024)
    assert (768, 1024) not in planned.shapes
    assert attention.precompile_next()
    assert (768, 1024) in planned.shapes
    planned.shapes.clear()
    attend(attention, 768, 1024)
    assert planned.shapes == {(768, 1024)}
    assert not attention.precompile_next()


def test_first_chunk_waits_for_one_plan(planned: Planned):
    attention = CudaAttention(4096)
    attend(attention, 1024, 2048)
    assert planned.shapes == {(1024, 2048)}
    assert attention.precompile_next()  # which looks whether it works
    attend(attention, 768, 2048)
    assert planned.shapes == {(1024, 2048), (768, 2048)}
    plan_all(attention)
    assert (256, 4096) in planned.shapes


def test_requested_chunk_shapes_are_precompiled_first_and_reported(planned: Planned):
    attention = CudaAttention(4096)
    assert attention.is_precompiled(768, 1024, 64)  # as far as is known: nothing has attended
    attend(attention, 256, 256)
    assert not attention.is_precompiled(768, 1024, 64)
    for _ in range(3):  # whether it works, what attended, and what was asked for
        assert attention.precompile_next()
    assert (768, 1024) in planned.shapes
    assert attention.is_precompiled(768, 1024, 64)
    assert not attention.is_precompiled(768, 2048, 64)
    plan_all(attention)
    new = planned.new
    for shape in [(768, 1024), (768, 2048), (1792, 4096)]:
        assert attention.is_precompiled(*shape, 64)
        attend(attention, *shape)
    assert planned.new == new
    assert attention.is_precompiled(768, 65536, 64)  # blocks end before that
    assert not attention.is_precompiled(768, 1024, 256)  # no plan is to come


def test_cuda_attention_failing_its_check_is_left_to_mlx(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cuda_attention, "_is_correct", lambda heads: False)
    attention = CudaAttention(4096)
    attend(attention, 256, 256)
    assert not attention.is_precompiled(768, 1024, 64)
    plan_all(attention)
    assert attention.is_precompiled(768, 1024, 64)


def test_failing_cuda_attention_check_is_not_repeated_forever(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
):
    def fail(heads: object) -> bool:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(cuda_attention, "_is_correct", fail)
    attention = CudaAttention(4096)
    attend(attention, 256, 256)
    with pytest.raises(RuntimeError):
        attention.precompile_next()
    assert not attention.precompile_next()
    attend(attention, 768, 1024)


def test_prompts_longer_than_planned_blocks_wait_for_one_plan(planned: Planned):
    attention = CudaAttention(1 << 20)
    attend(attention, 256, 256)
    plan_all(attention)
    attend(attention, 1280, 65536)
    assert (1280, 65536) in planned.shapes


def test_remembered_chunk_shapes_are_bounded(planned: Planned, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda_attention, "_MAX_CHUNK_SHAPES", 3)
    attention = CudaAttention(4096)
    attend(attention, 256, 256)
    plan_all(attention)
    for _ in range(2):
        for keys in range(1024, 4096, 256):
            attend(attention, 768, keys)
        (schedule,) = attention._schedules.values()
        assert len(schedule.wanted) <= 3
        plan_all(attention)
    for keys in range(8192, 12288, 256):
        attend(attention, 768, keys)
    assert len(schedule.chunks) == 3


def test_wrong_cuda_attention_falls_back_to_mlx(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        cuda_attention, "causal_attention", lambda q, k, v, scale, blocks: mx.zeros(q.shape)
    )
    attention = CudaAttention(4096)
    q, k, _ = halves(256, 512)
    for _ in range(2):
        found = attention(q, k, k, SCALE, "causal")
        assert max_distance(found, mlx_attention(q, k, k, "causal")) == 0
        assert not attention.precompile_next()


def test_cuda_attention_without_lasting_plans_falls_back_to_mlx():
    """As on this CPU, which plans nothing: the second time takes as long as the first."""
    attention = CudaAttention(4096)
    q, k, _ = halves(256, 512)
    attention(q, k, k, SCALE, "causal")
    assert not attention.precompile_next()
    assert max_distance(attention(q, k, k, SCALE, "causal"), mlx_attention(q, k, k, "causal")) == 0
