"""Attention of one layer of a vision tower, in a few large calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from vlm_server.runner.backends.interface import Backend
from vlm_server.runner.backends.rope import Rope


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of a frame; each patch attends within its own.

    runs: (count, patches of each) of consecutive segments. blocks: see `Backend.segment_blocks`.
    """

    runs: tuple[tuple[int, int], ...]
    blocks: mx.array | None = None


def attend(
    attention: Any, x: mx.array, rope: Rope, segments: Segments, backend: Backend
) -> mx.array:
    """Each patch's attention to its own segment. `x`: (frames, patches, hidden)."""
    frames, patches, _ = x.shape
    qkv = attention.qkv(x).reshape(frames, patches, 3, attention.num_heads, -1)
    rotated, values = backend.rotate(rope, qkv[:, :, :2]), qkv[:, :, 2]
    queries, keys = rotated[:, :, 0], rotated[:, :, 1]
    if segments.blocks is None:
        output = _run_by_run(queries, keys, values, attention.scale, segments.runs, backend)
    else:
        output = backend.attend_to_segments(queries, keys, values, segments.blocks, attention.scale)
    projected: mx.array = attention.proj(output.reshape(frames, patches, -1))
    return projected


def _run_by_run(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    runs: Sequence[tuple[int, int]],
    backend: Backend,
) -> mx.array:
    """Attention of patches, (frames, patches, heads, head size), within segments; of that shape."""
    frames, _, heads, size = queries.shape
    outputs, start = [], 0
    for count, length in runs:
        end = start + count * length
        q, k, v = (
            part[:, start:end].reshape(frames * count, length, heads, size).swapaxes(1, 2)
            for part in (queries, keys, values)
        )
        output = backend.attend(q, k, v, scale)
        outputs.append(output.swapaxes(1, 2).reshape(frames, count * length, heads, size))
        start = end
    return mx.concatenate(outputs, axis=1)
