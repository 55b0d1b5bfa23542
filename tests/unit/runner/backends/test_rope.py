"""Both implementations of RoPE agree with each other and with complex rotation."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from vlm_server.runner.backends.rope import Rope


def new_rope(*shape: int) -> tuple[Rope, np.ndarray]:
    angles = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    return Rope(mx.array(np.cos(angles)), mx.array(np.sin(angles))), angles


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_rope_rotates_pairs_by_their_angle(tokens: int):
    rope, angles = new_rope(2, 1, tokens, 4)
    x = np.random.default_rng(tokens).normal(size=(2, 3, tokens, 8)).astype(np.float32)
    complex_pairs = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)
    wanted = np.concatenate([complex_pairs.real, complex_pairs.imag], axis=-1)
    for apply in (rope.in_parts, rope.in_one_kernel):
        np.testing.assert_allclose(np.array(apply(mx.array(x))), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_rope_kernel_and_rope_in_parts_agree_on_array_slices(dtype: mx.Dtype):
    rope, _ = new_rope(1, 9, 1, 1, 4)
    queries_keys_values = mx.random.normal((2, 9, 3, 5, 8), key=mx.random.key(3)).astype(dtype)
    x = queries_keys_values[:, :, :2]
    one, parts = rope.in_one_kernel(x), rope.in_parts(x)
    assert one.dtype == parts.dtype == dtype
    assert one.shape == parts.shape == x.shape
    assert mx.array_equal(one, parts)
