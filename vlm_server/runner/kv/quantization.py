"""Keys and values with 8 or 4 bits per number, of the prefix cache or of running sequences.

The numbers of one token and head are quantized in groups, each with one scale (as llama.cpp's Q8_0
and Q4_0). The number of the largest magnitude becomes the lowest code, -128 or -8, so that the
scale is that number divided by a power of two. Therefore quantization is idempotent: what was
dequantized gets the same codes and scales again, bit for bit, and KV does not drift however often
it is restored and stored.

A quantized array is two arrays: codes, (..., size) int8, or (..., size / 2) uint8 with two codes
each; and scales, (..., groups) of the array's own type. Other arrays are stored as they are: the
types of a segment's arrays say how each was stored. Layers of running sequences have both arrays
packed into one, (..., bytes) uint8: the codes of a token and head, and its scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import mlx.core as mx

from vlm_server.cache.kv_storage import KVStorage

_QUANTIZABLE = (mx.float32, mx.float16, mx.bfloat16)
_CODE_TYPES = {8: mx.int8, 4: mx.uint8}
_LOW_BITS = 15
_BLOCK_NUMBERS = 1 << 19
"""Numbers of a block that is quantized at once."""


def row_bytes(size: int, dtype: mx.Dtype, storage: KVStorage) -> int:
    """Stored bytes of one head's key or value of one token, which has `size` numbers."""
    exact_bytes = size * dtype.size
    if storage.is_exact or dtype not in _QUANTIZABLE or size * storage.bits % 8:
        return exact_bytes
    num_groups = size // _group_size(size, storage)
    return min(exact_bytes, size * storage.bits // 8 + num_groups * dtype.size)


def quantize(array: mx.array, storage: KVStorage) -> tuple[mx.array, ...]:
    """Codes and scales of `array`, (..., size), lazy; a copy of it where they take no less."""
    size, dtype = array.shape[-1], array.dtype
    if row_bytes(size, dtype, storage) >= size * dtype.size:
        return (mx.contiguous(array),)
    lowest = -(1 << (storage.bits - 1))
    groups = mx.unflatten(array, -1, (-1, _group_size(size, storage))).astype(mx.float32)
    most, least = groups.max(axis=-1, keepdims=True), groups.min(axis=-1, keepdims=True)
    steps = mx.where(-least > most, least, most) / lowest
    scales = steps.astype(dtype)
    codes = groups / mx.where(scales == 0, mx.inf, steps)  # a step may be too small for the type
    codes = mx.clip(mx.round(codes), lowest, -1 - lowest).flatten(-2)
    return _pack(codes, storage.bits), scales.squeeze(-1)


def quantize_in_blocks(array: mx.array, storage: KVStorage) -> tuple[mx.array, ...]:
    """The same of (rows, heads, tokens, size), block by block.

    At once, it would take several times the bytes of the array meanwhile.
    """
    rows, heads, num_tokens, size = array.shape
    if row_bytes(size, array.dtype, storage) >= size * array.dtype.size:
        return quantize(array, storage)
    at_once, blocks = max(1, _BLOCK_NUMBERS // (rows * heads * size)), []
    for start in range(0, num_tokens, at_once):
        blocks.append(quantize(array[:, :, start : start + at_once], storage))
        mx.async_eval(blocks[-1])  # type: ignore[no-untyped-call]
    if len(blocks) == 1:
        return blocks[0]
    joined = tuple(mx.concatenate(list(parts), axis=2) for parts in zip(*blocks, strict=True))
    mx.async_eval(joined)  # type: ignore[no-untyped-call]
    return joined


def dequantized(arrays: Iterable[mx.array]) -> Iterator[mx.array]:
    """The keys and values, lazy, that a segment's `arrays` stand for."""
    remaining = iter(arrays)
    for array in remaining:
        is_quantized = array.dtype in _CODE_TYPES.values()
        yield _dequantize(array, next(remaining)) if is_quantized else array


def packed(keys: mx.array, values: mx.array, storage: KVStorage) -> tuple[mx.array, mx.array]:
    """Keys and values, (rows, heads, tokens, size), packed; as they are if that takes no less."""
    if keys.shape == values.shape and keys.dtype == values.dtype:  # half as many operations
        both = _packed(mx.stack([keys, values]), storage)
        return both[0], both[1]
    return _packed(keys, storage), _packed(values, storage)


def unpacked(array: mx.array, size: int, dtype: mx.Dtype, storage: KVStorage) -> mx.array:
    """Keys or values of `size` numbers of `dtype` that were packed."""
    if array.dtype == dtype:
        return array
    num_bytes = size * storage.bits // 8
    codes, scales = array[..., :num_bytes], array[..., num_bytes:].view(dtype)
    return _dequantize(codes.view(_CODE_TYPES[storage.bits]), scales)


def _packed(array: mx.array, storage: KVStorage) -> mx.array:
    arrays = quantize(array, storage)
    if len(arrays) == 1:
        return array
    return mx.concatenate([each.view(mx.uint8) for each in arrays], axis=-1)


def _dequantize(codes: mx.array, scales: mx.array) -> mx.array:
    """(..., size) in the type of `scales`: each number is rounded once."""
    numbers = _unpack(codes, scales.dtype)
    groups = mx.unflatten(numbers, -1, (scales.shape[-1], -1))
    return (groups * scales[..., None]).flatten(-2)


def _pack(codes: mx.array, bits: int) -> mx.array:
    if bits == 8:
        return codes.astype(mx.int8)
    low, high = mx.split((codes + 8).astype(mx.uint8), 2, axis=-1)
    return low | (high << 4)


def _unpack(packed: mx.array, dtype: mx.Dtype) -> mx.array:
    if packed.dtype == mx.int8:
        return packed.astype(dtype)
    codes = mx.concatenate([packed & _LOW_BITS, packed >> 4], axis=-1)
    return codes.astype(dtype) - 8


def _group_size(size: int, storage: KVStorage) -> int:
    """The largest divisor of `size` up to `storage.group_size`."""
    return next(number for number in range(storage.group_size, 0, -1) if not size % number)
