"""Attention by our own kernels, which write new keys and values in place: see attention.cu."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from vlm_server.runner.backends.cuda import source
from vlm_server.runner.backends.rows import KeysAndValues

_MAX_SPLITS = 64
_SUITABLE_BLOCKS = 256
"""MAX_SPLITS and SUITABLE_BLOCKS in attention.cu."""
_MERGING_WARPS = 4
"""Warps of a block that merges parts."""
_SOURCES = (*source.TILE_SOURCES, "attention.cu")
_INPUTS = ("queries", "new_keys", "new_values", "keys", "values", "bounds")


def append_and_attend(
    queries: mx.array,
    new: KeysAndValues,
    buffers: KeysAndValues,
    scale: float,
    bounds: mx.array,
    window: int = 0,
) -> mx.array:
    """Write `new` keys and values into `buffers`, in place, and attend to all.

    queries: (rows, heads, tokens, head size); returns as much. new: (rows, groups, tokens, head
    size). bounds: (rows, 3) int32: each row's first key, negative if it was dropped, the one after
    its last, and how many of them are new: further tokens are padding. Keys may be beyond the end
    of `buffers`, if those are the first columns of larger arrays. window: the number of keys that a
    query attends to; 0 for all.

    MLX is not told that `buffers` change: no other operation may use the written columns.
    """
    rows, heads, count, size = queries.shape
    groups = new[0].shape[1]
    num_queries = count * heads // groups
    splits = _count_splits(num_queries, groups)
    warps = _warps_for(num_queries)
    blocks = -(-num_queries // (source.QUERIES_OF_A_WARP * warps))
    template = [("T", queries.dtype), ("D", size)]
    parts, weights = _attention(size, scale, window)(
        inputs=[queries, *new, *buffers, bounds],
        template=template,
        grid=(blocks * splits * _value_parts(size) * warps * source.WARP, groups, rows),
        threadgroup=(warps * source.WARP, 1, 1),
        output_shapes=[(rows, count, heads, splits, size), (rows, count, heads, splits)],
        output_dtypes=[mx.float32, mx.float32],
    )
    output: mx.array = _merge_rows(window)(
        inputs=[parts, weights, bounds],
        template=template,
        grid=(rows * count * heads * source.WARP, 1, 1),
        threadgroup=(_MERGING_WARPS * source.WARP, 1, 1),
        output_shapes=[(rows, count, heads, size)],
        output_dtypes=[queries.dtype],
    )[0]
    return output.swapaxes(1, 2)


def append_and_attend_mixed(
    queries: mx.array,
    new: KeysAndValues,
    rows: tuple[KeysAndValues, mx.array],
    prompt: tuple[KeysAndValues, mx.array],
    scale: float,
    window: int = 0,
) -> mx.array:
    """`append_and_attend` of a mixed step: rows with a token each, and after them a prompt's.

    queries: (all tokens, heads, 1, head size); returns as much. new: (all tokens, groups, 1, head
    size). rows, prompt: buffers and bounds.
    """
    (buffers, bounds), (prompt_buffers, prompt_bounds) = rows, prompt
    count, heads, _, size = queries.shape
    groups, num_rows = new[0].shape[1], bounds.shape[0]
    shared = heads // groups
    num_queries = (count - num_rows) * shared
    row_splits, splits = _count_splits(shared, groups), _count_splits(num_queries, groups)
    warps = _warps_for(num_queries)
    blocks = -(-num_queries // (source.QUERIES_OF_A_WARP * warps))
    row_blocks = -(-shared // (source.QUERIES_OF_A_WARP * warps))
    num_blocks = max(blocks * splits, row_blocks * row_splits) * _value_parts(size)
    num_parts = heads * (num_rows * row_splits + (count - num_rows) * splits)
    template = [("T", queries.dtype), ("D", size)]
    parts, weights = _attention_mixed(size, scale, window)(
        inputs=[queries, *new, *buffers, bounds, *prompt_buffers, prompt_bounds],
        template=template,
        grid=(num_blocks * warps * source.WARP, groups, num_rows + 1),
        threadgroup=(warps * source.WARP, 1, 1),
        output_shapes=[(num_parts, size), (num_parts,)],
        output_dtypes=[mx.float32, mx.float32],
    )
    output: mx.array = _merge_mixed(window)(
        inputs=[parts, weights, queries, buffers[0], bounds, prompt_bounds],
        template=template,
        grid=(count * heads * source.WARP, 1, 1),
        threadgroup=(_MERGING_WARPS * source.WARP, 1, 1),
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
    )[0]
    return output


def _count_splits(num_queries: int, groups: int) -> int:
    """`count_splits` in attention.cu."""
    blocks = -(-num_queries // (source.QUERIES_OF_A_WARP * source.MOST_WARPS))
    return max(min(_SUITABLE_BLOCKS // (blocks * groups), _MAX_SPLITS), 1)


def _warps_for(num_queries: int) -> int:
    """The number of warps of a block of attention."""
    return min(-(-num_queries // source.QUERIES_OF_A_WARP), source.MOST_WARPS)


def _value_parts(size: int) -> int:
    """The number of blocks that share a head's values."""
    return size // source.values_of_block(size)


def _shared_memory(size: int) -> int:
    """Bytes of a tile of keys and one of values, twice if registers are not the limit anyway."""
    tile_bytes = source.tile_bytes(size) + source.tile_bytes(source.values_of_block(size))
    return tile_bytes if _value_parts(size) > 1 else 2 * tile_bytes


@cache
def _attention(size: int, scale: float, window: int) -> Any:
    return source.kernel(
        f"attention_{source.name_of(scale)}_{window}",
        _INPUTS,
        ["parts", "weights"],
        "attention_of_rows<D>(queries, new_keys, new_values, const_cast<T*>(keys),"
        " const_cast<T*>(values), bounds, queries_strides, new_keys_strides, new_values_strides,"
        " keys_strides, values_strides, queries_shape[1], queries_shape[2], keys_shape[1],"
        f" {source.literal_of(scale)}, {window}, parts, weights);",
        _SOURCES,
        shared_memory=_shared_memory(size),
    )


@cache
def _merge_rows(window: int) -> Any:
    return source.kernel(
        f"merge_rows_{window}",
        ["parts", "weights", "bounds"],
        ["out"],
        "merge_rows<D>(parts, weights, bounds, weights_shape[2], weights_shape[1],"
        f" weights_shape[0], weights_shape[3], {window}, out);",
        _SOURCES,
        is_strided=False,
    )


@cache
def _attention_mixed(size: int, scale: float, window: int) -> Any:
    return source.kernel(
        f"attention_mixed_{source.name_of(scale)}_{window}",
        [*_INPUTS, "prompt_keys", "prompt_values", "prompt_bounds"],
        ["parts", "weights"],
        "attention_mixed<D>(queries, new_keys, new_values, const_cast<T*>(keys),"
        " const_cast<T*>(values), bounds, const_cast<T*>(prompt_keys),"
        " const_cast<T*>(prompt_values), prompt_bounds, queries_strides, new_keys_strides,"
        " new_values_strides, keys_strides, values_strides, prompt_keys_strides,"
        " prompt_values_strides, queries_shape[1], bounds_shape[0], queries_shape[0],"
        f" keys_shape[1], {source.literal_of(scale)}, {window}, parts, weights);",
        _SOURCES,
        shared_memory=_shared_memory(size),
    )


@cache
def _merge_mixed(window: int) -> Any:
    return source.kernel(
        f"merge_mixed_{window}",
        ["parts", "weights", "queries", "keys", "bounds", "prompt_bounds"],
        ["out"],
        "merge_mixed<D>(parts, weights, bounds, prompt_bounds, queries_shape[1], keys_shape[1],"
        f" bounds_shape[0], queries_shape[0], {window}, out);",
        _SOURCES,
    )
