"""Metal's backend: MLX's own attention, in blocks where it would need too much memory."""

from __future__ import annotations

import mlx.core as mx

from vlm_server.platform import machine
from vlm_server.runner.backends.interface import FUSED_HEAD_SIZES, Attention, Backend, Mask

_MAX_SCORE_BYTES = 128 << 20
"""Size of the scores of a block of queries; larger ones would save no time."""


class MetalBackend(Backend):
    """The `Backend` of Apple silicon, whose kernel for few queries takes up to 8."""

    draft_widths = (2, 4, 8)
    errors_are_late = True
    shares_memory = True

    def is_short_of_memory(self, memory_bytes: int) -> bool:
        return machine.memory_pressure() > machine.NO_PRESSURE

    def attention(self, context_tokens: int) -> Attention:
        return MetalAttention()


class MetalAttention(Attention):
    """MLX's attention in blocks of queries, where it would hold all scores in memory.

    On Metal those are more than 8 queries of other head sizes than `FUSED_HEAD_SIZES`; MLX also
    has fused kernels for 192 and 256, but prefers unfused ones for speed.
    """

    def supports(self, queries: mx.array, keys: mx.array, mask: Mask) -> bool:
        size = queries.shape[-1]
        return size not in FUSED_HEAD_SIZES and _queries_at_once(queries, keys) < queries.shape[2]

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask
    ) -> mx.array:
        num_queries, num_keys = queries.shape[2], keys.shape[2]
        is_causal = isinstance(mask, str)
        step, blocks = _queries_at_once(queries, keys), []
        for start in range(0, num_queries, step):
            end = min(start + step, num_queries)
            num_seen = num_keys - num_queries + end if is_causal else num_keys
            part = mask
            if isinstance(mask, mx.array) and mask.shape[-2] > 1:
                part = mask[..., start:end, :]
            blocks.append(
                mx.fast.scaled_dot_product_attention(
                    queries[:, :, start:end],
                    keys[:, :, :num_seen],
                    values[:, :, :num_seen],
                    scale=scale,
                    mask=part,
                )
            )
        return mx.concatenate(blocks, axis=2)


def _queries_at_once(queries: mx.array, keys: mx.array) -> int:
    """The number of queries whose float32 scores take `_MAX_SCORE_BYTES`; at least 16."""
    rows, heads = queries.shape[:2]
    return max(16, _MAX_SCORE_BYTES // (4 * rows * heads * keys.shape[2]))
