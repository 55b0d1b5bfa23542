"""Inputs of attention, MLX's output for them, and how far another is from that."""

from __future__ import annotations

import mlx.core as mx

SCALE = 0.3


def random_qkv(
    queries: int, keys: int, *, rows: int = 1, shared: int = 4, room: int = 0
) -> tuple[mx.array, ...]:
    """Queries of eight heads, of which `shared` share keys and values.

    Keys and values begin a buffer of `room` tokens, or of some more than `keys`.
    """
    groups, room = 8 // shared, room or keys + 40
    shapes = ((rows, 8, queries, 16), (rows, groups, room, 16), (rows, groups, room, 24))
    q, k, v = (mx.random.normal(shape, key=mx.random.key(n)) for n, shape in enumerate(shapes))
    return q, k[:, :, :keys], v[:, :, :keys]


def mlx_attention(q: mx.array, k: mx.array, v: mx.array, mask: str | mx.array | None) -> mx.array:
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=SCALE, mask=mask)


def max_distance(one: mx.array, other: mx.array) -> float:
    assert one.shape == other.shape
    return float(mx.abs(one - other).max().item())
