"""Quantized KV is close to the KV, keeps every bit when stored again, and has the stated size."""

from __future__ import annotations

import mlx.core as mx
import pytest

from vlm_server.cache.kv_storage import EXACT, KVStorage
from vlm_server.runner.kv.quantization import (
    dequantized,
    packed,
    quantize,
    row_bytes,
    unpacked,
)

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
ROUNDING = {mx.float32: 2**-23, mx.float16: 2**-10, mx.bfloat16: 2**-7}
SIZES = [8, 24, 64, 80, 128, 512]


def keys(size: int, dtype: mx.Dtype, scale: float = 1.0, tokens: int = 60) -> mx.array:
    """Random keys, one of whose channels is large, as in real models."""
    numbers = mx.random.normal((1, 2, tokens, size), key=mx.random.key(size))
    channels = mx.where(mx.arange(size) == 1, 30.0, 1.0)
    return (numbers * channels * scale).astype(dtype)


def restored(array: mx.array, storage: KVStorage) -> mx.array:
    (numbers,) = dequantized(quantize(array, storage))
    return numbers


def are_equal(some: tuple[mx.array, ...], others: tuple[mx.array, ...]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(a.dtype == b.dtype and bool(mx.array_equal(a, b)) for a, b in pairs)


@pytest.mark.parametrize("scale", [300.0, 1.0, 1e-3, 1e-6], ids="times {}".format)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_restored_kv_is_stored_again_as_same_bytes(dtype: mx.Dtype, bits: int, scale: float):
    """Also numbers so small that their scales have hardly a bit in float16."""
    for size in SIZES:
        storage = KVStorage(bits)
        stored = quantize(keys(size, dtype, scale), storage)
        (first,) = dequantized(stored)
        assert are_equal(quantize(first, storage), stored), size


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_of_either_sign_at_limit_are_stored_again_as_same_bytes(dtype: mx.Dtype):
    """Both signs with the largest magnitude, ties between codes, and groups of zeros."""
    group = mx.array([1.0, -1.0, 0.5, -0.5, 1 / 256, -1 / 256, 127.5 / 128, 0.0])
    rows = mx.concatenate([group, -group, mx.zeros(8), 3 * group]).reshape(1, 1, 1, -1)
    for bits in (8, 4):
        storage = KVStorage(bits, group_size=8)
        stored = quantize(rows.astype(dtype), storage)
        assert len(stored) == 2
        (first,) = dequantized(stored)
        assert are_equal(quantize(first, storage), stored)
        assert not mx.any(first[..., 16:24])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_is_at_most_one_step_of_its_group(dtype: mx.Dtype, bits: int):
    """Half a step, but for numbers near the largest of the other sign."""
    for size in SIZES:
        array = keys(size, dtype)
        groups = mx.unflatten(array.astype(mx.float32), -1, (-1, min(size, 8)))
        errors = mx.unflatten(
            mx.abs(restored(array, KVStorage(bits, 8)).astype(mx.float32) - array), -1, (-1, 8)
        )
        largest = mx.abs(groups).max(axis=-1, keepdims=True)
        step = largest / (1 << (bits - 1))
        rounding = largest * ROUNDING[dtype]
        assert mx.all(errors <= step + rounding), size
        is_inside = mx.abs(groups) < largest - step
        assert mx.all((errors <= step / 2 + rounding) | ~is_inside), size


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_8_bits_hold_1_9_times_as_many_tokens(dtype: mx.Dtype, size: int):
    exact, stored = row_bytes(size, dtype, EXACT), row_bytes(size, dtype, KVStorage(8, 64))
    assert exact >= 1.9 * stored
    assert row_bytes(size, dtype, KVStorage(4, 64)) < 0.6 * stored


@pytest.mark.parametrize(
    ("size", "dtype", "storage"),
    [
        (8, mx.float32, EXACT),
        (8, mx.int32, KVStorage(8)),
        (7, mx.float16, KVStorage(4)),
        (2, mx.float16, KVStorage(8)),
        (0, mx.float16, KVStorage(8)),
    ],
    ids=["exact", "integers", "half a byte", "larger than before", "nothing"],
)
def test_kv_that_would_not_shrink_is_stored_exactly(size: int, dtype: mx.Dtype, storage: KVStorage):
    array = mx.arange(6 * size).reshape(1, 2, 3, size).astype(dtype)
    (stored,) = quantize(array, storage)
    assert are_equal((stored,), (array,))
    assert row_bytes(size, dtype, storage) == size * dtype.size


def test_row_bytes_are_those_of_arrays():
    for dtype in DTYPES:
        for size in SIZES:
            for storage in (KVStorage(8), KVStorage(4), KVStorage(8, 32), EXACT):
                arrays = quantize(keys(size, dtype), storage)
                num_bytes = sum(array.nbytes for array in arrays)
                assert num_bytes == 2 * 60 * row_bytes(size, dtype, storage)


def test_nan_stays_nan():
    array = keys(64, mx.float32)
    array[0, 0, 3, 5] = mx.nan
    assert mx.any(mx.isnan(restored(array, KVStorage(8))))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_kv_unpacks_to_same_numbers_as_stored_kv(dtype: mx.Dtype, bits: int):
    """Keys and values of one size or of two, and those that take no less packed."""
    storage = KVStorage(bits)
    for key_size, value_size in [(size, size) for size in SIZES] + [(64, 24), (2, 80), (7, 7)]:
        sides = keys(key_size, dtype), keys(value_size, dtype)
        for side, pack in zip(sides, packed(*sides, storage), strict=True):
            size = side.shape[-1]
            assert pack.nbytes == 2 * 60 * row_bytes(size, dtype, storage)
            part = unpacked(pack[:, :, 7:31], size, dtype, storage)
            assert part.dtype == dtype
            assert mx.array_equal(part, restored(side, storage)[:, :, 7:31])
