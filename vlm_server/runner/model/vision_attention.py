"""Attention of one layer of a vision tower, in a few large calls.

No call waits for the GPU. On a CPU the exponentials are numpy's: on x86 MLX takes 14 ns for one,
numpy 2, and they are most of an image's cost. Waiting for their argument also splits a tower's
work into small parts. MLX starts no operation of another stream while too many of one stream are
queued, so a decode step would otherwise wait for most of an encode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from vlm_server.runner.backends.cpu_attention import attention_on_cpu
from vlm_server.runner.backends.cuda.kernels import takes_segments
from vlm_server.runner.backends.cuda.segment_attention import attend_to_segments, blocks_of
from vlm_server.runner.device.arrays import share
from vlm_server.runner.device.device import Device
from vlm_server.runner.model.rope import Rope

_THETA = 10000.0
_FUSED_HEAD_SIZES = (64, 72, 80, 96, 128)
"""What MLX's fused attention takes on Metal; other head sizes are padded with zeros."""


@dataclass(frozen=True, slots=True)
class Segments:
    """What the patches of a frame attend to: their own segment.

    runs: (count, patches of each) of segments that follow each other.
    blocks: for our kernel, if that is to be used: see `attend_to_segments`.
    """

    runs: tuple[tuple[int, int], ...]
    blocks: mx.array | None = None


def many_segments(runs: tuple[tuple[int, int], ...], head_size: int, dtype: mx.Dtype) -> Segments:
    """Segments of many sizes, by one kernel where that is possible."""
    if not takes_segments(head_size, dtype):
        return Segments(runs)
    # What the host makes lies in memory that it shares with the device; a sum does not.
    return Segments(runs, mx.array(blocks_of(runs)) + 0)


def image_rope(positions: NDArray[np.int32], head_size: int) -> Rope:
    """RoPE at `positions` (patches, 2), for (frames, patches, any, heads, head size).

    Half of a head's angles grow with the patch's row, the other half with its column.
    """
    quarter = head_size // 4
    exponents = np.arange(quarter, dtype=np.float32) / np.float32(quarter)
    frequencies = 1.0 / np.float32(_THETA) ** exponents
    angles = positions[:, :, None].astype(np.float32) * frequencies
    angles = angles.reshape(1, len(positions), 1, 1, 2 * quarter)
    return Rope(mx.array(np.cos(angles)), mx.array(np.sin(angles)))


def attend(attention: Any, x: mx.array, rope: Rope, segments: Segments, device: Device) -> mx.array:
    """Each patch's attention to its own segment. `x`: (frames, patches, hidden)."""
    frames, patches, _ = x.shape
    qkv = attention.qkv(x).reshape(frames, patches, 3, attention.num_heads, -1)
    apply = rope.in_parts if device.is_cpu else rope.in_one_kernel
    rotated, values = apply(qkv[:, :, :2]), qkv[:, :, 2]
    queries, keys = rotated[:, :, 0], rotated[:, :, 1]
    if segments.blocks is None:
        output = _run_by_run(queries, keys, values, attention.scale, segments.runs, device)
    else:
        output = attend_to_segments(queries, keys, values, segments.blocks, attention.scale)
    projected: mx.array = attention.proj(output.reshape(frames, patches, -1))
    return projected


def _run_by_run(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    runs: Sequence[tuple[int, int]],
    device: Device,
) -> mx.array:
    """Attention of patches, (frames, patches, heads, head size), to their own segments; as much."""
    frames, _, heads, size = queries.shape
    attention = attention_on_cpu if device.is_cpu else attention_on_gpu
    outputs, start = [], 0
    for count, length in runs:
        end = start + count * length
        q, k, v = (
            part[:, start:end].reshape(frames * count, length, heads, size).swapaxes(1, 2)
            for part in (queries, keys, values)
        )
        output = attention(q, k, v, scale)
        outputs.append(output.swapaxes(1, 2).reshape(frames, count * length, heads, size))
        start = end
    return mx.concatenate(outputs, axis=1)


def exp_in_place(x: mx.array) -> mx.array:
    """e to the power of each number, in float32. Waits for `x`, and writes over it.

    So `x` must be nobody else's. Copies of 8 MB each would be most of an image's cost.
    """
    x = x.astype(mx.float32)
    numbers = share(x)
    with np.errstate(over="ignore"):
        np.exp(numbers, out=numbers)
    return x


def attention_on_gpu(q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
    """`softmax(q @ k.T * scale) @ v`, all (batch, heads, patches, head size)."""
    size = q.shape[-1]
    fused = next((fused for fused in _FUSED_HEAD_SIZES if size <= fused), size)
    if fused != size:
        zeros = [(0, 0)] * 3 + [(0, fused - size)]
        q, k, v = mx.pad(q, zeros), mx.pad(k, zeros), mx.pad(v, zeros)
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale)[..., :size]
