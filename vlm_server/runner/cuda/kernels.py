"""Our CUDA kernels: the sources in this folder, as functions of arrays.

MLX compiles a kernel when it is first used, and keeps it for the life of the process.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_server.runner.device.device import current_device

logger = logging.getLogger(__name__)

_TOLERANCE = 0.5
"""Between sums of 128 products in bfloat16 and in float32, some 11 in size."""
_FOLDER = Path(__file__).parent
_WARP = 32

_MOST_SPLITS = 64
"""Into how many parts `attention` splits a row."""
_SUITABLE_BLOCKS = 256
"""Of a row, to keep a GPU busy."""
_TILE_KEYS = 64
"""`KEYS` in attention.cu."""
_QUERIES = 16
"""Of a warp."""
_MOST_WARPS = 4
SKINNY_ROWS = 32
"""The most rows of `skinny_linear`."""
SKINNY_DEPTH = 64
"""`skinny_linear` takes multiples of it."""
_SKINNY_COLUMNS = 16
_SKINNY_WARPS = 8
_MERGING_WARPS = 4
"""Of a block of `merge_attention`."""
_WIDEST_ACCESS = 16
"""Bytes that a thread reads or writes at once."""
_COPYING_THREADS = 256
"""Of a block of `arrange_rows`."""


def skinny_linear(x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
    """`x @ weight.T + bias` for (..., depth) and (columns, depth): see skinny_linear.cu."""
    columns = weight.shape[0]
    output: mx.array = _skinny_linear()(
        inputs=[weight, x, weight if bias is None else bias],
        template=[("T", x.dtype)],
        grid=(-(-columns // _SKINNY_COLUMNS) * _SKINNY_WARPS * _WARP, 1, 1),
        threadgroup=(_SKINNY_WARPS * _WARP, 1, 1),
        output_shapes=[(*x.shape[:-1], columns)],
        output_dtypes=[x.dtype],
    )[0]
    return output


def append_and_attend(
    queries: mx.array,
    new: tuple[mx.array, mx.array],
    buffers: tuple[mx.array, mx.array],
    scale: float,
    bounds: mx.array,
) -> mx.array:
    """Write `new` keys and values into `buffers`, in place, and attend to all: see attention.cu.

    queries: (rows, heads, tokens, head size); returns as much. new: (rows, groups, tokens, head
    size). bounds: (rows, 3) int32: each row's first key, the one after its last, and how many of
    them are new: further tokens are padding. Keys may be beyond the end of `buffers`, if those are
    the first columns of larger arrays.

    MLX is not told that `buffers` change: nobody else may have the columns that are written.
    """
    rows, heads, count, size = queries.shape
    groups = new[0].shape[1]
    num_queries = count * heads // groups
    warps = min(-(-num_queries // _QUERIES), _MOST_WARPS)
    blocks = -(-num_queries // (_QUERIES * warps))
    splits = max(min(_SUITABLE_BLOCKS // (blocks * groups), _MOST_SPLITS), 1)
    places, template = (rows, count, heads), [("T", queries.dtype), ("D", size)]
    parts, weights = _attention(size)(
        inputs=[queries, *new, *buffers, bounds, mx.array(scale, dtype=mx.float32)],
        template=template,
        grid=(blocks * splits * warps * _WARP, groups, rows),
        threadgroup=(warps * _WARP, 1, 1),
        output_shapes=[(*places, splits, size), (*places, splits)],
        output_dtypes=[mx.float32, mx.float32],
    )
    output: mx.array = _merge_attention()(
        inputs=[parts, weights, bounds],
        template=template,
        grid=(rows * count * heads * _WARP, 1, 1),
        threadgroup=(_MERGING_WARPS * _WARP, 1, 1),
        output_shapes=[(*places, size)],
        output_dtypes=[queries.dtype],
    )[0]
    return output.swapaxes(1, 2)


def takes_rows(sources: Sequence[tuple[mx.array, mx.array]]) -> bool:
    """Whether `arrange_rows` can be used here, for these."""
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
    rows = places.shape[0]
    shape = rows, heads, capacity, size
    units = capacity * size * keys.dtype.size // _WIDEST_ACCESS
    made = _arrange_rows()(
        inputs=[*sources[0], *sources[-1], places],
        template=[("T", keys.dtype)],
        grid=(-(-units // _COPYING_THREADS) * _COPYING_THREADS, heads, 2 * rows),
        threadgroup=(_COPYING_THREADS, 1, 1),
        output_shapes=[shape, shape],
        output_dtypes=[keys.dtype, keys.dtype],
    )
    return made[0], made[1]


@cache
def can_be_used() -> bool:
    """Whether `skinny_linear` and `arrange_rows` can be used here, and give what MLX does.

    Compiling them takes seconds, the first time.
    """
    if not current_device().runs_our_kernels:
        return False
    x, weight = (mx.random.normal((rows, 128), key=mx.random.key(rows)) for rows in (3, 40))
    expected = x @ weight.T
    rows = weight.reshape(2, 4, 10, 64)
    places = mx.array([[0, 1, 2, 7, 3, 12], [1, 0, 1, 9, 0, 12]])
    sources = [(rows, -rows), (2 * rows, -2 * rows)]
    first = mx.pad(rows[1:, :, 2:9], [(0, 0), (0, 0), (3, 2), (0, 0)])
    second = mx.pad(2 * rows[:1, :, 1:], [(0, 0), (0, 0), (0, 3), (0, 0)])
    arranged = mx.concatenate([first, second])
    try:
        found = skinny_linear(x.astype(mx.bfloat16), weight.astype(mx.bfloat16), None)
        distance = float(np.array(mx.abs(found - expected).max()))
        for side, sign in zip(arrange_rows(sources, places, 12), (1, -1), strict=True):
            distance += float(np.array(mx.abs(side - sign * arranged).max()))
    except Exception:
        logger.warning("our CUDA kernels for linear layers and rows can't be used", exc_info=True)
        return False
    if not distance < _TOLERANCE:
        logger.warning(
            "our CUDA kernels for linear layers and rows are not used: %.2g off", distance
        )
        return False
    return True


@cache
def _skinny_linear() -> Any:
    return _kernel(
        "skinny_linear",
        ["weight", "x", "bias"],
        ["y"],
        "int num_rows = 1; for (int i = 0; i + 1 < x_ndim; i++) num_rows *= x_shape[i];"
        "skinny_linear(weight, x, bias == weight ? (const T*)nullptr : bias, y, num_rows,"
        " weight_shape[0], weight_shape[1]);",
        ["mma.cuh", "skinny_linear.cu"],
        shared_memory=_SKINNY_WARPS * SKINNY_ROWS * _SKINNY_COLUMNS * 4,
        is_strided=False,
    )


@cache
def _attention(size: int) -> Any:
    return _kernel(
        "attention",
        ["queries", "new_keys", "new_values", "keys", "values", "bounds", "scale"],
        ["parts", "weights"],
        "attention<T, D>(queries, new_keys, new_values, const_cast<T*>(keys),"
        " const_cast<T*>(values), bounds, queries_strides, new_keys_strides, new_values_strides,"
        " keys_strides, values_strides, queries_shape[1], queries_shape[2], keys_shape[1], *scale,"
        " parts, weights);",
        ["mma.cuh", "attention.cu"],
        shared_memory=4 * _TILE_KEYS * (size + 8) * 2,
    )


@cache
def _merge_attention() -> Any:
    return _kernel(
        "merge_attention",
        ["parts", "weights", "bounds"],
        ["out"],
        "merge_attention<T, D>(parts, weights, bounds, weights_shape[2], weights_shape[1],"
        " weights_shape[0], weights_shape[3], out);",
        ["mma.cuh", "attention.cu"],
        is_strided=False,
    )


@cache
def _arrange_rows() -> Any:
    return _kernel(
        "arrange_rows",
        ["keys_0", "values_0", "keys_1", "values_1", "places"],
        ["keys", "values"],
        "arrange_rows<T>(keys_0, values_0, keys_1, values_1, keys_0_strides, values_0_strides,"
        " keys_1_strides, values_1_strides, places, places_shape[0], keys_0_shape[1],"
        " keys_0_shape[3], keys, values);",
        ["arrange_rows.cu"],
    )


def _kernel(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    body: str,
    sources: Sequence[str],
    shared_memory: int = 0,
    *,
    is_strided: bool = True,
) -> Any:
    """`is_strided`: whether it takes inputs as they lie in memory, rather than contiguous."""
    return mx.fast.cuda_kernel(
        name=f"vlm_{name}",
        input_names=inputs,
        output_names=outputs,
        source=body,
        header="".join(_code(source) for source in sources),
        ensure_row_contiguous=not is_strided,
        shared_memory=shared_memory,
    )


def _code(name: str) -> str:
    """A source without what people read: MLX hashes all of it at every call."""
    text = re.sub(r"//.*", "", (_FOLDER / name).read_text())
    return re.sub(r"\n\s*", "\n", text)
