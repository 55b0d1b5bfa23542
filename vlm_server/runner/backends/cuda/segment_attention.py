"""Attention to the segments of a picture by a kernel of ours: see segment_attention.cu."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from vlm_server.runner.backends.cuda.attention_tiles import (
    MOST_WARPS,
    QUERIES_OF_A_WARP,
    TILE_SOURCES,
    literal_of,
    name_of,
    tile_bytes,
)
from vlm_server.runner.backends.cuda.source import WARP, kernel


def attend_to_segments(
    queries: mx.array, keys: mx.array, values: mx.array, blocks: mx.array, scale: float
) -> mx.array:
    """Attention of patches, (frames, patches, heads, head size), to their own segments; as much.

    blocks: what `blocks_of` makes of the segments.
    """
    frames, _, heads, size = queries.shape
    output: mx.array = _segment_attention(size, scale)(
        inputs=[queries, keys, values, blocks],
        template=[("T", queries.dtype), ("D", size)],
        grid=(blocks.shape[0] * MOST_WARPS * WARP, heads, frames),
        threadgroup=(MOST_WARPS * WARP, 1, 1),
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
    )[0]
    return output


def blocks_of(segments: Iterable[tuple[int, int]]) -> NDArray[np.int32]:
    """The work for segments that follow each other, runs of (count, patches of each): (blocks, 3).

    Of each: its first query, its segment's first patch and the one after its last.
    """
    blocks, start = [], 0
    for count, length in segments:
        for _ in range(count):
            end = start + length
            step = QUERIES_OF_A_WARP * MOST_WARPS
            blocks += [(query, start, end) for query in range(start, end, step)]
            start = end
    return np.array(blocks, dtype=np.int32)  # noqa: TID251  a list


@cache
def _segment_attention(size: int, scale: float) -> Any:
    return kernel(
        f"segment_attention_{name_of(scale)}",
        ["queries", "keys", "values", "blocks"],
        ["out"],
        "segment_attention<D>(queries, keys, values, blocks, queries_strides, keys_strides,"
        " values_strides, queries_shape[1], queries_shape[2],"
        f" {literal_of(scale)}, out);",
        (*TILE_SOURCES, "segment_attention.cu"),
        shared_memory=2 * tile_bytes(size),
    )
