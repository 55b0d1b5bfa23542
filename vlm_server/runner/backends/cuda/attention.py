"""CUDA's backend: attention in shapes for which cuDNN already has an execution plan.

cuDNN's plan for a new shape or new strides takes 45 to 80 ms on an H200's host, while the attention
of a chunk takes 2 to 7 ms in all layers. So prefill chunks are padded (`model.chunks`) to the same
layout, and an attention schedule lists the shapes to plan while the engine is idle: those that
occurred, and blocks of queries with each number of keys. A chunk of a new shape is computed block
by block, which takes some milliseconds more than one call, but needs no new plan.

Decode steps of most models, and their chunks until those are planned, are compiled steps with a
kernel of ours, which takes any lengths (`attend_bounded`). Steps of other models, and batched
prefills, have a mask and another shape each time: two matrix products, which need no plan. Queries
that share keys are one matrix; MLX's own way reads the keys again for each.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from vlm_server.runner.backends.bounded_layer import BoundedLayer, MixedLayer
from vlm_server.runner.backends.cuda import kernels
from vlm_server.runner.backends.cuda.attention_kernels import (
    append_and_attend,
    append_and_attend_mixed,
)
from vlm_server.runner.backends.cuda.experts import use_expert_kernels
from vlm_server.runner.backends.cuda.few_rows import use_few_rows_kernels
from vlm_server.runner.backends.dequantize import dequantize_for_many_rows
from vlm_server.runner.backends.interface import Attention, Backend, Mask, Rotate
from vlm_server.runner.device.arrays import to_numpy

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 256
"""At most `KVCache.step`, for which caches have room."""
_FULL_SHARE = 32
"""Memory is short if less than 1/32 of the device is free."""
_BLOCKS = (4 * BLOCK_TOKENS, 2 * BLOCK_TOKENS, BLOCK_TOKENS)
"""Numbers of queries of a block, the largest first."""
_MAX_BLOCK_TOKENS = 32768
"""Maximum length of prompts whose blocks are planned, if MLX keeps that many plans."""
_MAX_CHUNK_SHAPES = 128
_MAX_MASKED_QUERIES = 64
"""Maximum queries with a mask: more would need too much memory for scores."""
_MAX_SCORES = 1 << 26
"""Maximum scores of a batched prefill: 128 MiB."""
_MAX_HEAD_SIZE = 128
_LARGE_HEADS = (256, 512)
"""Larger heads that our kernels take."""
_DTYPES = (mx.bfloat16, mx.float16)
"""Limits of cuDNN."""
_TOLERANCE = 0.05
"""Allowed distance between two computations in half precision."""
_KEPT_BY_DEFAULT = 256
"""MLX's default number of plans."""

Shape = tuple[int, int]
"""The numbers of queries and keys."""


@dataclass(frozen=True, slots=True)
class _Heads:
    """Heads of a layer: what a plan depends on besides its shape."""

    num_queries: int
    num_keys: int
    size: int
    value_size: int
    dtype: mx.Dtype


@dataclass(slots=True)
class _Schedule:
    """The planned and wanted shapes of layers with one kind of heads.

    block_lengths: numbers of keys for which all blocks are planned. chunks: shapes planned as a
    whole, least recently used first. wanted: shapes that occurred and are to be planned.
    """

    block_lengths: range
    is_checked: bool = False
    blocks: set[Shape] = field(default_factory=set)
    chunks: dict[Shape, None] = field(default_factory=dict)
    wanted: dict[Shape, None] = field(default_factory=dict)

    def __contains__(self, shape: Shape) -> bool:
        return shape in self.blocks or shape in self.chunks

    def has_blocks(self, shape: Shape) -> bool:
        return all(block in self for block in _blocks(shape))

    def add(self, shape: Shape) -> None:
        """Record that a shape was planned or used."""
        self.wanted.pop(shape, None)
        if shape[0] in _BLOCKS and shape[1] in self.block_lengths:
            self.blocks.add(shape)
            return
        self.chunks.pop(shape, None)
        self.chunks[shape] = None
        if len(self.chunks) > _MAX_CHUNK_SHAPES:
            del self.chunks[next(iter(self.chunks))]

    def want(self, shape: Shape) -> None:
        if len(self.wanted) < _MAX_CHUNK_SHAPES:
            self.wanted[shape] = None

    def next(self) -> Shape | None:
        """The shape to plan next; None if none is left."""
        if self.wanted:
            return next(iter(self.wanted))
        blocks = ((block, length) for length in self.block_lengths for block in _BLOCKS)
        return next((b for b in blocks if b[0] <= b[1] and b not in self.blocks), None)


class CudaBackend(Backend):
    """The `Backend` of NVIDIA's GPUs, whose host often launches slower than the device runs.

    Verifying 16 tokens takes as long as two, and a pass of 256 tokens two thirds as long as one of
    640. Few patches, as those of a tile, take less time than their launch.
    """

    draft_widths = (16,)
    compiles_towers = True
    is_filled_by_a_tile = False
    prefill_padding_tokens = BLOCK_TOKENS
    mixed_step_tokens = 640
    max_inner_points = 2

    def used_bytes(self) -> int:
        info = mx.device_info(mx.default_device())
        return int(info["total_memory"]) - int(info["free_memory"]) if "free_memory" in info else 0

    def is_short_of_memory(self, memory_bytes: int) -> bool:
        """Whether little memory is free; False if the driver reports nothing."""
        used_bytes = self.used_bytes()
        return used_bytes > 0 and memory_bytes - used_bytes < memory_bytes // _FULL_SHARE

    def attention(self, context_tokens: int) -> Attention:
        return CudaAttention(context_tokens, num_kept_plans())

    def use_kernels(self, model: Any, free_bytes: int) -> Rotate | None:
        if not kernels.can_be_used():
            return None
        use_few_rows_kernels(model.language_model)
        use_expert_kernels(model)
        dequantize_for_many_rows(model)
        return kernels.rotate_heads

    def segment_blocks(
        self, runs: Iterable[tuple[int, int]], head_size: int, dtype: mx.Dtype
    ) -> mx.array | None:
        if not kernels.takes_segments(head_size, dtype):
            return None
        # An array from the host lies in memory shared with the device; a sum does not.
        return mx.array(kernels.blocks_of(runs)) + 0

    def attend_to_segments(
        self, q: mx.array, k: mx.array, v: mx.array, blocks: mx.array, scale: float
    ) -> mx.array:
        return kernels.attend_to_segments(q, k, v, blocks, scale)

    def gated_delta(
        self, q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array] | None:
        if not kernels.takes_state(q, k, v, state):
            return None
        return kernels.gated_delta(q, k, v, g, beta, state)


class CudaAttention(Attention):
    """The `Attention` of one model, with its schedule of plans."""

    padding_tokens = BLOCK_TOKENS
    appends_in_place = True

    def __init__(self, context_tokens: int, num_plans: int = _KEPT_BY_DEFAULT) -> None:
        """`num_plans`: number of plans that MLX keeps."""
        room = num_plans - _MAX_CHUNK_SHAPES
        most = min(context_tokens, _MAX_BLOCK_TOKENS, room // len(_BLOCKS) * BLOCK_TOKENS)
        self._block_lengths = range(BLOCK_TOKENS, most + BLOCK_TOKENS, BLOCK_TOKENS)
        self._schedules = dict[_Heads, _Schedule]()
        """The schedule of each kind of layer that has attended."""
        self._works_ahead = True

    def supports(self, queries: mx.array, keys: mx.array, mask: Mask) -> bool:
        rows, heads, count, size = queries.shape
        if queries.dtype != keys.dtype or queries.dtype not in _DTYPES:
            return False
        if isinstance(mask, mx.array):
            return count <= _MAX_MASKED_QUERIES and mask.ndim == 4 and mask.dtype == mx.bool_
        if mask == "causal" and rows > 1:
            return rows * heads * count * keys.shape[2] <= _MAX_SCORES
        are_blocks = count % BLOCK_TOKENS == keys.shape[2] % BLOCK_TOKENS == 0
        return mask == "causal" and are_blocks and size <= _MAX_HEAD_SIZE

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask
    ) -> mx.array:
        if isinstance(mask, mx.array):
            return masked_attention(queries, keys, values, scale, mask)
        if len(queries) > 1:
            return masked_attention(queries, keys, values, scale, _causal_mask(queries, keys))
        output = self._causal(queries, keys, values, scale)
        # The device begins with this layer while the host builds those that follow.
        mx.async_eval(output)  # type: ignore[no-untyped-call]
        return output

    def _causal(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float
    ) -> mx.array:
        """Causal attention of one row, in planned shapes if that is possible."""
        _, count, _, size = queries.shape
        heads = _Heads(count, keys.shape[1], size, values.shape[-1], queries.dtype)
        schedule = self._schedules.setdefault(heads, _Schedule(self._block_lengths))
        shape = queries.shape[2], keys.shape[2]
        if not (self._works_ahead and schedule.is_checked):
            schedule.want(shape)
            return _whole(queries, keys, values, scale)
        if shape not in schedule and schedule.has_blocks(shape):
            schedule.want(shape)
            return causal_attention(queries, keys, values, scale, [q for q, _ in _blocks(shape)])
        schedule.add(shape)  # the call plans it
        return causal_attention(queries, keys, values, scale, [shape[0]])

    def attend_bounded(self, queries: mx.array, layer: BoundedLayer, scale: float) -> mx.array:
        assert layer.new is not None
        _check_heads(queries, layer.new)
        buffers = layer.keys, layer.values
        return append_and_attend(
            queries, layer.new, buffers, scale, layer.bounds, layer.window or 0
        )

    def attend_mixed(self, queries: mx.array, layer: MixedLayer, scale: float) -> mx.array:
        assert layer.new is not None
        _check_heads(queries, layer.new)
        if layer.rows is None:
            (_, queries), *new = (layer.split(array) for array in (queries, *layer.new))
            layer.prompt.new = new[0][1], new[1][1]
            return self.attend_bounded(queries, layer.prompt, scale).transpose(2, 1, 0, 3)
        rows, prompt = (
            ((part.keys, part.values), part.bounds) for part in (layer.rows, layer.prompt)
        )
        window = layer.prompt.window or 0
        return append_and_attend_mixed(queries, layer.new, rows, prompt, scale, window)

    def is_precompiled(self, num_queries: int, num_keys: int, head_size: int) -> bool:
        if head_size > _MAX_HEAD_SIZE:
            return False  # our kernel is faster
        shape = num_queries, num_keys
        if not self._works_ahead or num_keys not in self._block_lengths:
            return True  # no plan is to come
        is_missing = False
        for schedule in self._schedules.values():
            if not (schedule.is_checked and (shape in schedule or schedule.has_blocks(shape))):
                schedule.want(shape)
                is_missing = True
        return not is_missing

    def precompile_next(self) -> bool:
        if not self._works_ahead:
            return False
        for heads, schedule in self._schedules.items():
            if not schedule.is_checked:
                self._works_ahead = False  # also if the check raises
                schedule.is_checked = self._works_ahead = _is_correct(heads)
                return self._works_ahead
            if (shape := schedule.next()) is not None:
                schedule.add(shape)
                mx.eval(_attend_random(heads, shape))
                return True
        return False


def _check_heads(queries: mx.array, new: tuple[mx.array, mx.array]) -> None:
    size = queries.shape[-1]
    are_alike = {array.shape[-1] for array in new} == {size}
    fits = size % 16 == 0 if size <= _MAX_HEAD_SIZE else size in _LARGE_HEADS
    if not (are_alike and fits and queries.dtype in _DTYPES):
        raise NotImplementedError(f"no kernel for heads of {size} in {queries.dtype}")


def causal_attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, blocks: Sequence[int]
) -> mx.array:
    """Causal attention of one row, with `blocks` of queries in order.

    (1, heads, tokens, head size). The last query is at the last key.
    """
    queries, keys, values = (
        mx.contiguous(array.squeeze(0).swapaxes(0, 1)) for array in (queries, keys, values)
    )
    num_before, end, outputs = len(keys) - len(queries), 0, []
    for count in blocks:
        start, end = end, end + count
        num_seen = num_before + end
        seen_keys, seen_values = _slice(keys, 0, num_seen), _slice(values, 0, num_seen)
        output = _whole(_slice(queries, start, end), seen_keys, seen_values, scale)
        outputs.append(output.swapaxes(1, 2))
    return (outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)).swapaxes(1, 2)


def masked_attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array
) -> mx.array:
    """Attention to the keys set in `mask`, (rows or 1, 1, queries, keys) bool."""
    rows, heads, count, size = queries.shape
    groups, num_keys = keys.shape[1:3]
    shared = (queries * scale).reshape(rows, groups, -1, size)
    scores = (shared @ keys.swapaxes(-1, -2)).reshape(rows, groups, -1, count, num_keys)
    scores = mx.where(mask[:, None], scores, mx.finfo(scores.dtype).min)
    weights = mx.softmax(scores, axis=-1, precise=True).reshape(rows, groups, -1, num_keys)
    return (weights @ values).reshape(rows, heads, count, -1)


def _causal_mask(queries: mx.array, keys: mx.array) -> mx.array:
    """(1, 1, queries, keys) bool; the last query is at the last key."""
    num_queries, num_keys = queries.shape[2], keys.shape[2]
    last = mx.arange(num_keys - num_queries, num_keys)
    return (mx.arange(num_keys) <= last[:, None])[None, None]


def _whole(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask="causal")


def _blocks(shape: Shape) -> list[Shape]:
    """The blocks of a chunk of this shape, the longest first."""
    (num_queries_left, num_keys), blocks = shape, []
    while num_queries_left:
        block = next(length for length in _BLOCKS if length <= num_queries_left)
        num_queries_left -= block
        blocks.append((block, num_keys - num_queries_left))
    return blocks


def num_kept_plans() -> int:
    try:
        return int(os.environ["MLX_CUDA_SDPA_CACHE_SIZE"])
    except (KeyError, ValueError):
        return _KEPT_BY_DEFAULT


def _slice(array: mx.array, start: int, end: int) -> mx.array:
    """Tokens of a contiguous (tokens, heads, size) as (1, heads, tokens, size).

    Its strides do not depend on its start or the number of tokens.
    """
    _, heads, size = array.shape
    strides = (heads * size, size, heads * size, 1)
    return mx.as_strided(array, (1, heads, end - start, size), strides, start * heads * size)


def _random(heads: _Heads, shape: Shape) -> tuple[mx.array, mx.array, mx.array]:
    num_queries, num_keys = shape
    shapes = (
        (1, heads.num_queries, num_queries, heads.size),
        (1, heads.num_keys, num_keys, heads.size),
        (1, heads.num_keys, num_keys, heads.value_size),
    )
    queries, keys, values = (mx.random.normal(sizes).astype(heads.dtype) for sizes in shapes)
    mx.eval(queries, keys, values)
    return queries, keys, values


def _attend_random(heads: _Heads, shape: Shape) -> mx.array:
    """Lazy attention of a chunk of this shape, whose evaluation plans it."""
    return causal_attention(*_random(heads, shape), heads.size**-0.5, [shape[0]])


def _is_correct(heads: _Heads) -> bool:
    """Whether blocks agree with MLX's attention, and cuDNN plans a shape once, as measured."""
    scale, seconds = heads.size**-0.5, []
    for _ in range(2):
        inputs = _random(heads, (2 * BLOCK_TOKENS, 3 * BLOCK_TOKENS))
        reference = _whole(*inputs, scale)
        mx.eval(reference)
        started_at = time.perf_counter()
        outputs = causal_attention(*inputs, scale, [BLOCK_TOKENS] * 2)
        mx.eval(outputs)
        seconds.append(time.perf_counter() - started_at)
        distance = float(to_numpy(mx.abs(outputs - reference).max().astype(mx.float32)))
    if distance > _TOLERANCE or seconds[1] > seconds[0] / 3:
        logger.warning(
            "attention is not planned ahead: blocks take %.1f and %.1f ms and are %.2g off",
            *(1000 * duration for duration in seconds),
            distance,
        )
        return False
    return True
