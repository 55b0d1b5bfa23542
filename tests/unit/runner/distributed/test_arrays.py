"""Arrays arrive as they were sent, whatever their type and layout."""

from __future__ import annotations

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from vlm_server.runner.distributed.arrays import Array, of_mlx, of_numpy, to_mlx, to_numpy

TYPES = (mx.float32, mx.bfloat16, mx.float16, mx.int32, mx.uint8, mx.bool_)


def sent(array: Array) -> Array:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(array), type=Array)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (0, 5), (), (2, 1, 3)], ids=str)
def test_of_mlx(dtype: mx.Dtype, shape: tuple[int, ...]):
    array = (mx.random.normal(shape) * 3).astype(dtype)
    got = to_mlx(sent(of_mlx(array)))
    assert got.dtype == dtype
    assert got.shape == shape
    assert mx.array_equal(got, array)


def test_a_transposed_part_of_an_array():
    part = mx.arange(24).reshape(4, 6)[1:3, ::2].T
    assert mx.array_equal(to_mlx(sent(of_mlx(part))), part)


@pytest.mark.parametrize("dtype", ["int32", "float32", "bool"])
def test_of_numpy(dtype: str):
    array = np.arange(12).reshape(3, 4).astype(dtype)[:, ::2]
    got = to_numpy(sent(of_numpy(array)))
    assert got.dtype == array.dtype
    assert np.array_equal(got, array)
