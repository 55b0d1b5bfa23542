"""Attention of one layer of a vision tower, in a few large calls.

No call waits for the GPU. On a CPU the exponentials are numpy's: on x86 MLX takes 14 ns for one,
numpy 2, and they are most of an image's cost. Waiting for their argument also splits a tower's
work into small parts. MLX starts no operation of another stream while too many of one stream are
queued, so a decode step would otherwise wait for most of an encode.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from vlm_server.runner.cpu_attention import attention_on_cpu
from vlm_server.runner.device.device import Device
from vlm_server.runner.rope import Rope

Segments = tuple[tuple[int, int], ...]
"""How the patches of a frame attend, in their order: runs of (count, patches of each)."""

_THETA = 10000.0
_FUSED_HEAD_SIZES = (64, 80, 128)
"""What MLX's fused attention takes on Metal; other head sizes are padded with zeros."""


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
    run = attention_on_cpu if device.is_cpu else attention_on_gpu
    outputs, start = [], 0
    for count, length in segments:
        end = start + count * length
        queries, keys, those = (
            part[:, start:end].reshape(frames * count, length, *part.shape[2:]).swapaxes(1, 2)
            for part in (rotated[:, :, 0], rotated[:, :, 1], values)
        )
        output = run(queries, keys, those, attention.scale)
        outputs.append(output.swapaxes(1, 2).reshape(frames, count * length, -1))
        start = end
    projected: mx.array = attention.proj(mx.concatenate(outputs, axis=1))
    return projected


def exp_in_place(x: mx.array) -> mx.array:
    """e to the power of each number, in float32. Waits for `x`, and writes over it.

    So `x` must be nobody else's. Copies of 8 MB each would be most of an image's cost.
    """
    x = x.astype(mx.float32)
    mx.eval(x)
    numbers = np.array(x, copy=False)
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
