"""Comparable readings of MLX's active memory."""

from __future__ import annotations

import gc

import mlx.core as mx


def active_bytes() -> int:
    """Bytes of arrays that are alive and reachable.

    Without the collection, what an earlier test left in a cycle of references could go away
    between two readings. A step that was launched ahead may still be under way.
    """
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()
