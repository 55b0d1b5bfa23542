"""Our CPU attention equals MLX's."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.support.whole_run import few_of
from tests.unit.runner.backends.attention_inputs import (
    SCALE,
    max_distance,
    mlx_attention,
    random_qkv,
)
from vlm_server.runner.backends import cpu
from vlm_server.runner.backends.cpu import attention_on_cpu


@pytest.mark.parametrize("max_scores", few_of([1, 20_000, 1 << 21], [20_000]))
@pytest.mark.parametrize(("queries", "keys"), [(1, 9), (2, 2), (37, 37), (37, 600), (130, 131)])
@pytest.mark.parametrize(("rows", "shared"), [(1, 4), (3, 1), (2, 8)])
def test_cpu_attention_equals_mlxs(
    monkeypatch: pytest.MonkeyPatch,
    max_scores: int,
    queries: int,
    keys: int,
    rows: int,
    shared: int,
):
    monkeypatch.setattr(cpu, "_MAX_SCORES", max_scores)
    q, k, v = random_qkv(queries, keys, rows=rows, shared=shared)
    causal = attention_on_cpu(q, k, v, SCALE, is_causal=True)
    assert causal.shape == (rows, 8, queries, 24)
    assert max_distance(causal, mlx_attention(q, k, v, "causal")) < 1e-5
    assert max_distance(attention_on_cpu(q, k, v, SCALE), mlx_attention(q, k, v, None)) < 1e-5


def test_cpu_causal_attention_ignores_later_keys():
    q, k, v = random_qkv(40, 90)
    expected = attention_on_cpu(q, k, v, SCALE, is_causal=True)[:, :, :10]
    k[:, :, 60:], v[:, :, 60:] = 1e6, 1e6
    assert (attention_on_cpu(q, k, v, SCALE, is_causal=True)[:, :, :10] == expected).all()


def test_large_attention_scores_do_not_overflow():
    q, k, v = random_qkv(5, 9)
    assert (
        max_distance(
            attention_on_cpu(q * 1e4, k, v, SCALE, is_causal=True),
            mlx_attention(q * 1e4, k, v, "causal"),
        )
        < 1e-5
    )


def test_cpu_attention_leaves_inputs_unchanged():
    q, k, v = random_qkv(5, 9)
    before = [mx.contiguous(each) for each in (q, k, v)]
    mx.eval(before, attention_on_cpu(q, k, v, SCALE, is_causal=True))
    assert all((one == other).all() for one, other in zip((q, k, v), before, strict=True))
