"""Our CUDA kernels, except for attention and linear layers, as functions of arrays."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from vlm_server.runner.backends.cuda import compiler, source
from vlm_server.runner.backends.cuda.linear_kernels import Packing, expert_rows, skinny_linear
from vlm_server.runner.backends.gated_delta import gated_delta_in_chunks
from vlm_server.runner.device.arrays import to_numpy
from vlm_server.runner.device.device import current_device

logger = logging.getLogger(__name__)

_TOLERANCE = 0.5
"""Allowed distance between sums of 128 products in bfloat16 and float32, some 11 in size."""
_MOST_HEAD_SIZE = 128
"""Largest head of `attend_to_segments`."""
_WIDEST_ACCESS = 16
"""Bytes of a thread's widest read or write."""
_KEY_SIZES = (32, 64, 96, 128, 256)
"""Key sizes of `gated_delta`."""
_STATE_ROWS, _STATE_TOKENS, _STATE_LANES = 32, 16, 8
"""Of a block of `gated_delta`: rows of the state, tokens per tile, and threads per row."""
_COPYING_THREADS, _ROTATING_THREADS = 256, 128
"""Threads of a block of `arrange_rows`, and of `rotate_heads`."""


def rotate_heads(
    queries: mx.array, keys: mx.array, cosines: mx.array, sines: mx.array
) -> tuple[mx.array, mx.array]:
    """RoPE of queries and keys, (rows, heads, tokens, head size), by pairs (i, i + half).

    cosines, sines: (rows or 1, 1, tokens, half) float32. Numbers of a head beyond 2 * half stay as
    they are. See rotate_heads.cu.
    """
    rows, heads, count, size = queries.shape
    num_threads = rows * (heads + keys.shape[1]) * count * size // 2
    rotated = _rotate_heads()(
        inputs=[queries, keys, cosines, sines],
        template=[("Q", queries.dtype), ("K", keys.dtype)],
        grid=(-(-num_threads // _ROTATING_THREADS) * _ROTATING_THREADS, 1, 1),
        threadgroup=(_ROTATING_THREADS, 1, 1),
        output_shapes=[queries.shape, keys.shape],
        output_dtypes=[queries.dtype, keys.dtype],
    )
    return rotated[0], rotated[1]


def takes_state(q: mx.array, k: mx.array, v: mx.array, state: mx.array) -> bool:
    """Whether `gated_delta` can be used here, for these."""
    is_known = q.dtype == k.dtype == v.dtype and state.dtype == mx.float32
    return is_known and q.shape[-1] in _KEY_SIZES and can_be_used()


def gated_delta(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """See `backends.gated_delta`, and gated_delta.cu."""
    rows, _, heads, size = v.shape
    outputs = _gated_delta(q.shape[-1])(
        inputs=[q, k, v, *(mx.contiguous(each.astype(mx.float32)) for each in (g, beta, state))],
        template=[("T", q.dtype)],
        grid=(-(-size // _STATE_ROWS) * _STATE_ROWS * _STATE_LANES, rows * heads, 1),
        threadgroup=(_STATE_ROWS * _STATE_LANES, 1, 1),
        output_shapes=[v.shape, state.shape],
        output_dtypes=[q.dtype, mx.float32],
    )
    return outputs[0], outputs[1]


def takes_rows(sources: Sequence[tuple[mx.array, mx.array]]) -> bool:
    """Whether `arrange_rows` supports these sources on this device."""
    if not can_be_used():
        return False
    kinds = {(array.shape[1], array.shape[3], array.dtype) for each in sources for array in each}
    _, size, dtype = next(iter(kinds))
    return len(kinds) == 1 and size * dtype.size % _WIDEST_ACCESS == 0


def arrange_rows(
    sources: Sequence[tuple[mx.array, mx.array]], places: mx.array, capacity: int
) -> tuple[mx.array, mx.array]:
    """New keys and values, (rows, heads, capacity, head size): see arrange_rows.cu.

    sources: one or two pairs of such arrays. places: (rows, 6) int32.
    """
    keys = sources[0][0]
    _, heads, _, size = keys.shape
    shape = len(places), heads, capacity, size
    units = capacity * size * keys.dtype.size // _WIDEST_ACCESS
    outputs = _arrange_rows()(
        inputs=[*sources[0], *sources[-1], places],
        template=[("T", keys.dtype)],
        grid=(-(-units // _COPYING_THREADS) * _COPYING_THREADS, heads, 2 * len(places)),
        threadgroup=(_COPYING_THREADS, 1, 1),
        output_shapes=[shape, shape],
        output_dtypes=[keys.dtype, keys.dtype],
    )
    return outputs[0], outputs[1]


def attend_to_segments(
    queries: mx.array, keys: mx.array, values: mx.array, blocks: mx.array, scale: float
) -> mx.array:
    """Attention of patches, (frames, patches, heads, head size), within segments; of that shape.

    blocks: what `blocks_of` makes of the segments. See segment_attention.cu.
    """
    frames, _, heads, size = queries.shape
    output: mx.array = _segment_attention(size, scale)(
        inputs=[queries, keys, values, blocks],
        template=[("T", queries.dtype), ("D", size)],
        grid=(blocks.shape[0] * source.MOST_WARPS * source.WARP, heads, frames),
        threadgroup=(source.MOST_WARPS * source.WARP, 1, 1),
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
    )[0]
    return output


def blocks_of(segments: Iterable[tuple[int, int]]) -> NDArray[np.int32]:
    """The blocks of work, (blocks, 3), for segments in order: runs of (count, patches of each).

    Of each block: its first query, its segment's first patch and the one after its last.
    """
    blocks, start, step = [], 0, source.QUERIES_OF_A_WARP * source.MOST_WARPS
    for length in (length for count, length in segments for _ in range(count)):
        end = start + length
        blocks += [(query, start, end) for query in range(start, end, step)]
        start = end
    return np.array(blocks, dtype=np.int32)  # noqa: TID251  a list


def takes_segments(head_size: int, dtype: mx.Dtype) -> bool:
    """Whether `attend_to_segments` supports such heads on this device."""
    is_of_tiles = head_size % 16 == 0 and head_size <= _MOST_HEAD_SIZE
    return is_of_tiles and dtype in (mx.bfloat16, mx.float16) and can_be_used()


@cache
def can_be_used() -> bool:
    """Whether these kernels can be used and agree with MLX. Takes seconds if they are compiled."""
    if not current_device().runs_our_kernels:
        return False
    checks = (
        _distance_of_linear,
        _distance_of_experts,
        _distance_of_rows,
        _distance_of_heads,
        _distance_of_segments,
        _distance_of_gated_delta,
    )
    try:
        with compiler.in_parallel():
            distances = [check() for check in checks]
        distance = sum(float(to_numpy(array)) for array in distances)
    except Exception:
        logger.warning("our CUDA kernels can't be used", exc_info=True)
        return False
    if not distance < _TOLERANCE:
        logger.warning("our CUDA kernels are not used: %.2g off", distance)
        return False
    return True


def _distance_of_linear() -> mx.array:
    x, weight = (mx.random.normal((rows, 128), key=mx.random.key(rows)) for rows in (3, 40))
    halves = x.astype(mx.bfloat16), weight.astype(mx.bfloat16)
    one = skinny_linear(*halves, None, (40,))[0]
    parts = mx.concatenate(skinny_linear(*halves, None, (8, 32)), axis=-1)
    packed, scales, offsets = mx.quantize(halves[1], group_size=64, bits=4)
    packing = Packing(scales, offsets, 4, 64)
    quantized = skinny_linear(halves[0], packed, None, (40,), packing)[0]
    dequantized = mx.dequantize(packed, scales, offsets, group_size=64, bits=4)
    distance = _distance(one, x @ weight.T) + _distance(parts, one)
    return distance + _distance(quantized, halves[0] @ dequantized.T)


def _distance_of_experts() -> mx.array:
    x, weight = (mx.random.normal((*rows, 128), key=mx.random.key(1)) for rows in ((70,), (3, 40)))
    x, experts = x.astype(mx.bfloat16), mx.array([0] * 66 + [2] * 4, mx.uint32)
    packed, scales, offsets = mx.quantize(weight.astype(mx.bfloat16), group_size=64, bits=4)
    outputs = expert_rows(x, packed, None, experts, Packing(scales, offsets, 4, 64))
    dequantized = mx.dequantize(packed, scales, offsets, group_size=64, bits=4)
    return _distance(outputs, (x[:, None] @ dequantized[experts].swapaxes(1, 2))[:, 0])


def _distance_of_rows() -> mx.array:
    rows = mx.random.normal((2, 4, 10, 64), key=mx.random.key(0))
    places = mx.array([[0, 1, 2, 7, 3, 12], [1, 0, 1, 9, 0, 12]])
    sources = [(rows, -rows), (2 * rows, -2 * rows)]
    first = mx.pad(rows[1:, :, 2:9], [(0, 0), (0, 0), (3, 2), (0, 0)])
    second = mx.pad(2 * rows[:1, :, 1:], [(0, 0), (0, 0), (0, 3), (0, 0)])
    keys, values = arrange_rows(sources, places, 12)
    expected = mx.concatenate([first, second])
    return _distance(keys, expected) + _distance(values, -expected)


def _distance_of_heads() -> mx.array:
    heads = mx.random.normal((2, 5, 3, 16), key=mx.random.key(0))
    angles = mx.random.normal((2, 1, 5, 6), key=mx.random.key(1))
    queries, keys = heads.swapaxes(1, 2), heads.swapaxes(1, 2)[:, :1]
    cosines, sines = mx.cos(angles), mx.sin(angles)
    first, second, rest = mx.split(queries, [6, 12], axis=-1)
    rotated = first * cosines - second * sines, second * cosines + first * sines
    expected = mx.concatenate([*rotated, rest], axis=-1)
    outputs = rotate_heads(queries, keys, cosines, sines)
    return _distance(outputs[0], expected) + _distance(outputs[1], expected[:, :1])


def _distance_of_segments() -> mx.array:
    shape, segments, scale = (2, 102, 2, 16), [(2, 16), (1, 70)], 0.25
    queries, keys, values = (mx.random.normal(shape, key=mx.random.key(i)) for i in range(3))
    q, k, v = (array.astype(mx.bfloat16) for array in (queries, keys, values))
    outputs = attend_to_segments(q, k, v, mx.array(blocks_of(segments)), scale)
    places = mx.array(np.repeat(np.arange(3), [16, 16, 70]))
    expected = mx.fast.scaled_dot_product_attention(
        *(array.swapaxes(1, 2) for array in (queries, keys, values)),
        scale=scale,
        mask=places[:, None] == places,
    )
    return _distance(outputs, expected.swapaxes(1, 2))


def _distance_of_gated_delta() -> mx.array:
    q, k = (mx.random.normal((2, 5, 2, 64), key=mx.random.key(i)) / 8 for i in range(2))
    v, state = (mx.random.normal((2, n, 4, 40), key=mx.random.key(n)) for n in (5, 64))
    g, beta = (mx.random.uniform(shape=(2, 5, 4), key=mx.random.key(i)) for i in range(2))
    arguments = q, k, v, g, beta, state.transpose(0, 2, 3, 1)
    outputs, expected = gated_delta(*arguments), gated_delta_in_chunks(*arguments)
    return _distance(outputs[0], expected[0]) + _distance(outputs[1], expected[1])


def _distance(outputs: mx.array, expected: mx.array) -> mx.array:
    return mx.abs(outputs - expected).max().astype(mx.float32)


@cache
def _gated_delta(key_size: int) -> Any:
    return source.kernel(
        f"gated_delta_{key_size}",
        ["q", "k", "v", "g", "beta", "state"],
        ["y", "new_state"],
        f"gated_delta<T, {key_size}, {_STATE_TOKENS}, {_STATE_ROWS}>(q, k, v, g, beta, state,"
        " q_strides, k_strides, v_strides, q_shape[1], k_shape[2], v_shape[2], v_shape[3], y,"
        " new_state);",
        ["gated_delta.cu"],
    )


@cache
def _rotate_heads() -> Any:
    return source.kernel(
        "rotate_heads",
        ["queries", "keys", "cosines", "sines"],
        ["new_queries", "new_keys"],
        "rotate_heads(queries, keys, cosines, sines, queries_strides, keys_strides,"
        " cosines_strides, sines_strides, queries_shape[0], queries_shape[1], keys_shape[1],"
        " queries_shape[2], queries_shape[3], cosines_shape[0], cosines_shape[3], new_queries,"
        " new_keys);",
        ["rotate_heads.cu"],
    )


@cache
def _arrange_rows() -> Any:
    return source.kernel(
        "arrange_rows",
        ["keys_0", "values_0", "keys_1", "values_1", "places"],
        ["keys", "values"],
        "arrange_rows<T>(keys_0, values_0, keys_1, values_1, keys_0_strides, values_0_strides,"
        " keys_1_strides, values_1_strides, places, places_shape[0], keys_0_shape[1],"
        " keys_0_shape[3], keys, values);",
        ["arrange_rows.cu"],
    )


@cache
def _segment_attention(size: int, scale: float) -> Any:
    return source.kernel(
        f"segment_attention_{source.name_of(scale)}",
        ["queries", "keys", "values", "blocks"],
        ["out"],
        "segment_attention<D>(queries, keys, values, blocks, queries_strides, keys_strides,"
        " values_strides, queries_shape[1], queries_shape[2],"
        f" {source.literal_of(scale)}, out);",
        (*source.TILE_SOURCES, "segment_attention.cu"),
        shared_memory=2 * source.tile_bytes(size),
    )
