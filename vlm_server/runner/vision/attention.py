"""Attention of a vision tower's layer, in a few large calls. Knows the modules of one layer.

No call waits for the GPU. On a CPU the exponentials are numpy's: MLX takes 14 ns for one on
x86, numpy 2, and that is most of what a picture costs. Waiting for their argument also cuts a
tower's work into small pieces; MLX lets no other stream's operation start while too many of
one stream's are on their way, so that a decode step would wait for most of an encode.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from vlm_server.runner.rope import Rope, is_cpu

Segments = tuple[tuple[int, int], ...]
"""How the patches of a frame attend, in their order: runs of (count, patches of each)."""

_THETA = 10000.0
_FUSED_HEAD_SIZES = (64, 80, 128)
"""What MLX's fused attention takes on Metal; other heads are filled up with zeros."""
_MAX_CPU_SCORES = 2_000_000
"""Attention scores that are worked on at once, on a CPU: 8 MB of them."""


def patch_places(height: int, width: int, merged: int) -> NDArray[np.int32]:
    """(row, column) of each patch of a frame, (patches, 2), in the processor's order.

    The patches of one token, `merged` by `merged`, follow each other.
    """
    places = np.moveaxis(np.indices((height, width), dtype=np.int32), 0, -1)
    tokens = places.reshape(height // merged, merged, width // merged, merged, 2)
    return tokens.transpose(0, 2, 1, 3, 4).reshape(-1, 2)


def picture_rotation(places: NDArray[np.int32], head_size: int) -> Rope:
    """By `places` (patches, 2), for heads of (frames, patches, any, heads, head size).

    Half of a head's angles grow with the patch's row, the other half with its column.
    """
    quarter = head_size // 4
    exponents = np.arange(quarter, dtype=np.float32) / np.float32(quarter)
    frequencies = 1.0 / np.float32(_THETA) ** exponents
    angles = places[:, :, None].astype(np.float32) * frequencies
    angles = angles.reshape(1, len(places), 1, 1, 2 * quarter)
    return Rope(mx.array(np.cos(angles)), mx.array(np.sin(angles)))


def attend(attention: Any, x: mx.array, rotation: Rope, segments: Segments) -> mx.array:
    """Each patch's attention to its own segment. `x`: (frames, patches, hidden)."""
    frames, patches, _ = x.shape
    qkv = attention.qkv(x).reshape(frames, patches, 3, attention.num_heads, -1)
    turned, values = rotation(qkv[:, :, :2]), qkv[:, :, 2]
    run = attention_on_cpu if is_cpu() else attention_on_gpu
    outputs, start = [], 0
    for count, length in segments:
        end = start + count * length
        queries, keys, those = (
            part[:, start:end].reshape(frames * count, length, *part.shape[2:]).swapaxes(1, 2)
            for part in (turned[:, :, 0], turned[:, :, 1], values)
        )
        output = run(queries, keys, those, attention.scale)
        outputs.append(output.swapaxes(1, 2).reshape(frames, count * length, -1))
        start = end
    projected: mx.array = attention.proj(mx.concatenate(outputs, axis=1))
    return projected


def exp_in_place(x: mx.array) -> mx.array:
    """e to the power of each number, in float32. Waits for `x`, and writes over it.

    So `x` must be nobody else's. Copies of what is 8 MB at a time would cost most of the picture.
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


def attention_on_cpu(q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
    """The same, for some of the queries at a time."""
    batch, heads, patches, _ = q.shape
    keys, at_once = k.swapaxes(-1, -2), max(1, _MAX_CPU_SCORES // (batch * heads * patches))
    outputs = []
    for start in range(0, patches, at_once):
        scores = (q[:, :, start : start + at_once] * scale) @ keys
        weights = exp_in_place(scores - scores.max(axis=-1, keepdims=True))
        outputs.append((weights @ v) / weights.sum(axis=-1, keepdims=True))
    return mx.concatenate(outputs, axis=2).astype(v.dtype)
