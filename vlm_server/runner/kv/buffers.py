"""The capacity of KV buffers, which grow by whole steps."""

from __future__ import annotations

from mlx_vlm.models.cache import KVCache


def buffer_capacity(num_tokens: int) -> int:
    """Columns of a buffer for `num_tokens` and at least one more."""
    return int((num_tokens // KVCache.step + 1) * KVCache.step)
