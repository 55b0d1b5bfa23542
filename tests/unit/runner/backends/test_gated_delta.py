"""The chunked gated delta rule equals the rule applied token by token."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_vlm.models.gated_delta import gated_delta_ops

from vlm_server.runner.backends.gated_delta import gated_delta_in_chunks
from vlm_server.runner.model.attention import _RULES

STEP_BY_STEP = next(f for (_, name), f in _RULES.items() if name == gated_delta_ops.__name__)


def inputs(rows: int, count: int, value_size: int, weakest_decay: float) -> list[mx.array]:
    """Inputs with keys that are much alike, as those of a real model."""
    mx.random.seed(count)
    q, k = (mx.random.normal((rows, count, 2, 32), loc=1) for _ in range(2))
    q, k = (mx.fast.rms_norm(each, None, 1e-6) / 32**0.5 for each in (q, k))
    v = mx.random.normal((rows, count, 4, value_size))
    g = mx.random.uniform(weakest_decay, 1, (rows, count, 4))
    beta = mx.random.uniform(shape=(rows, count, 4))
    return [q, k, v, g, beta, mx.random.normal((rows, 4, value_size, 32))]


def relative_distance(found: mx.array, expected: mx.array) -> float:
    return float((mx.linalg.norm(found - expected) / mx.linalg.norm(expected)).item())


@pytest.mark.parametrize(
    ("rows", "count", "value_size", "weakest_decay"),
    [(1, 5, 32, 0.5), (2, 64, 48, 0.9), (1, 130, 32, 0.999), (3, 300, 16, 0.0), (1, 2, 32, 0.9)],
)
def test_chunked_gated_delta_equals_single_steps(
    rows: int, count: int, value_size: int, weakest_decay: float
):
    arguments = inputs(rows, count, value_size, weakest_decay)
    for found, expected in zip(
        gated_delta_in_chunks(*arguments), STEP_BY_STEP(*arguments), strict=True
    ):
        assert found.shape == expected.shape
        assert relative_distance(found, expected) < 2e-6


def test_zero_decay_clears_state():
    q, k, v, g, beta, state = inputs(1, 70, 32, 0.5)
    g[:, 66] = 0
    found = gated_delta_in_chunks(q, k, v, g, beta, state)
    expected = gated_delta_in_chunks(q, k, v, g, beta, 100 * state)
    assert relative_distance(found[1], expected[1]) < 1e-6
    assert not mx.any(mx.isnan(found[0])).item()
