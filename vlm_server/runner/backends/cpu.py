"""The CPU's backend: attention in blocks of queries, with numpy's exponentials.

On x86 MLX takes 12 ns for one exponential and numpy less than one, and MLX's own attention makes
the scores of all queries and keys, hidden ones too, several times over. Here a block of queries
attends to the keys up to its last query, so that only the block's own columns need a mask. Queries
that share keys are one matrix: no key is repeated.

Every block waits for its scores, so calling this is computing most of it. That also splits the work
of a vision tower into small parts. MLX starts no operation of another stream while too many of one
stream are queued: a decode step would otherwise wait for most of an encode.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from vlm_server.runner.backends.dequantize import dequantize
from vlm_server.runner.backends.gated_delta import gated_delta_in_chunks
from vlm_server.runner.backends.interface import Attention, Backend, Mask, Rotate
from vlm_server.runner.backends.rope import Rope
from vlm_server.runner.device.arrays import share

_FLOATS = (mx.float32, mx.bfloat16, mx.float16)
_MAX_SCORES = 1 << 21
"""Scores of a block, 8 MiB. With fewer, threads wait too often for the interpreter."""


class CpuBackend(Backend):
    """The `Backend` of a CPU, which compiles nothing, and is fast only in float32."""

    draft_widths = (2, 3, 4, 6, 8, 12, 16)
    default_dtype = "float32"
    compiles_kernels = False
    encodes_in_turns = False
    uses_blas = True
    trims_own_pool = False

    def pool_bytes(self, limit_bytes: int) -> int:
        """A small pool: a CPU's memory is shared, and the system allocates it fast."""
        return 256 << 20

    def attention(self, context_tokens: int) -> Attention:
        return CpuAttention()

    def use_kernels(self, model: Any, free_bytes: int) -> Rotate | None:
        dequantize(model, free_bytes)
        return None

    def use_kernels_of_head(self, module: Any, free_bytes: int) -> None:
        dequantize(module, free_bytes)

    def attend(self, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        return attention_on_cpu(q, k, v, scale)

    def rotate(self, rope: Rope, x: mx.array) -> mx.array:
        return rope.in_parts(x)

    def prepare_mlp(self, mlp: Any) -> None:
        """No padding: a CPU multiplies matrices of any width fast."""

    def gated_mlp(self, mlp: Any, x: mx.array) -> mx.array:
        gate = mlp.gate_proj(x)
        silu = (gate / (1 + _exp_in_place(-gate))).astype(gate.dtype)
        return mlp.down_proj(silu * mlp.up_proj(x))  # type: ignore[no-any-return]

    def gated_delta(
        self, q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array] | None:
        if q.shape[1] == 1:
            return None
        return gated_delta_in_chunks(q, k, v, g, beta, state)


class CpuAttention(Attention):
    """Plain causal attention, computed in float32."""

    def supports(self, queries: mx.array, keys: mx.array, mask: Mask) -> bool:
        is_float = queries.dtype == keys.dtype and queries.dtype in _FLOATS
        return is_float and isinstance(mask, str) and mask == "causal"

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask
    ) -> mx.array:
        if values.dtype == mx.float32:
            return attention_on_cpu(queries, keys, values, scale, is_causal=True)
        outputs, groups = [], keys.shape[1]
        split = (side.split(groups, axis=1) for side in (queries, keys, values))
        for sides in zip(*split, strict=True):  # one head of keys at a time
            q, k, v = (side.astype(mx.float32) for side in sides)
            output = attention_on_cpu(q, k, v, scale, is_causal=True)
            outputs.append(output.astype(values.dtype))
        return mx.concatenate(outputs, axis=1)


def attention_on_cpu(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, *, is_causal: bool = False
) -> mx.array:
    """`softmax(queries @ keys.T * scale) @ values`, all (rows, heads, tokens, head size).

    There may be fewer heads of keys and values than of queries, which then share them in turn. If
    `is_causal`, the last query is at the last key, and none sees keys after its own.
    """
    rows, heads, num_queries, size = queries.shape
    groups, num_keys = keys.shape[1:3]
    at_once = max(1, _MAX_SCORES // (rows * heads * num_keys))
    transposed, outputs = keys.swapaxes(-1, -2), []
    for start in range(0, num_queries, at_once):
        end = min(start + at_once, num_queries)
        num_seen = num_keys - num_queries + end if is_causal else num_keys
        block = (queries[:, :, start:end] * scale).reshape(rows, groups, -1, size)
        scores = (block @ transposed[..., :num_seen]).astype(mx.float32)
        sums = _softmax_in_place(scores, end - start if is_causal else 0)
        output = (scores @ values[:, :, :num_seen]) / mx.array(sums)
        outputs.append(output.reshape(rows, heads, end - start, -1))
        mx.async_eval(outputs[-1])  # type: ignore[no-untyped-call]  # else all scores were kept
    return mx.concatenate(outputs, axis=2).astype(values.dtype)


def _softmax_in_place(scores: mx.array, num_causal: int) -> NDArray[np.float32]:
    """Write softmax's numerators over evaluated `scores`, (rows, groups, queries, keys).

    Returns their sums, (rows, groups, queries, 1). Of each run of `num_causal` queries, query i
    attends to all but the last `num_causal - 1 - i` columns; 0 for no causal mask.
    """
    numbers = share(scores)
    if num_causal > 1:
        *outer, _, columns = numbers.shape
        causal_scores = numbers.reshape(*outer, -1, num_causal, columns)[
            ..., columns - num_causal :
        ]
        causal_scores += np.triu(np.full((num_causal, num_causal), -np.inf, dtype=np.float32), 1)
    with np.errstate(invalid="ignore"):  # of a model whose numbers overflow
        numbers -= numbers.max(axis=-1, keepdims=True)
        np.exp(numbers, out=numbers)
    sums: NDArray[np.float32] = numbers.sum(axis=-1, keepdims=True)
    return sums


def _exp_in_place(x: mx.array) -> mx.array:
    """The exponential of each number, in float32. Waits for `x`, and overwrites it."""
    x = x.astype(mx.float32)
    numbers = share(x)
    with np.errstate(over="ignore"):
        np.exp(numbers, out=numbers)
    return x
