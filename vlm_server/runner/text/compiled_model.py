"""Runs a language model on new tokens by graphs that are built once, and replayed by the host.

A compiled graph has fixed shapes, while KV grows with each token. So the model gets each layer's
whole buffers, and where each row's tokens are in them as numbers on the device. There is a graph
for each number of rows and of tokens. On CUDA, our attention writes and reads the buffers through
views of their first columns, so that their size does not matter; elsewhere, there is a graph for
each size, too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import KVCache

from vlm_server.runner.kv.batch_cache import RowsKVCache, advance, bounds_of, make_room
from vlm_server.runner.kv.bounded_layer import VIEW_TOKENS, BoundedLayer, first_columns
from vlm_server.runner.text.attention import ModelAttention
from vlm_server.runner.text.lm_head import logits_at, logits_of_last
from vlm_server.runner.text.mrope import DecodePositions, next_position_ids
from vlm_server.runner.text.speculation.speculation import MAX_ROWS as MAX_DRAFTING_ROWS

logger = logging.getLogger(__name__)

_MOST_ROWS = 32
"""Of graphs that are built ahead."""

_CHUNKS = (1, 32, 128)
"""How many tokens graphs of prefill chunks have. Longer chunks keep the device busy without."""
_TOKEN_AXES = {"inputs_embeds": 1, "position_ids": 2}
"""Arguments that graphs take, and which of their axes has an entry for each token."""

Sides = list[tuple[mx.array, mx.array]]
"""Keys and values of each layer."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """A graph's: that of decode steps has `rows`, that of prefill chunks has one."""

    rows: int
    count: int
    is_prefill: bool = False


class CompiledModel:
    """One language model whose layers only append. Finds out by itself if it can't be compiled."""

    def __init__(
        self,
        language_model: Any,
        attention: ModelAttention,
        positions: DecodePositions,
        draft_widths: Sequence[int],
    ) -> None:
        """`draft_widths`: see `Device`."""
        self._language_model = language_model
        self._attention = attention
        self._positions = positions
        self._in_place = attention.appends_in_place
        self._compiled: Any = mx.compile(self._run)
        self.works = True
        """False once it was found that the model can't be compiled."""
        self._sides: Sides = []
        """A column of those of the first call; graphs that are built ahead have such shapes."""
        self._inputs: dict[str, mx.array] = {}
        """A token of those of the first chunk, likewise."""
        rows = range(1, _MOST_ROWS + 1)
        wide = [_Shape(rows, n) for rows in range(1, MAX_DRAFTING_ROWS + 1) for n in draft_widths]
        chunks = [_Shape(1, count, is_prefill=True) for count in _CHUNKS]
        wanted = [*(_Shape(number, 1) for number in rows), *wide, *chunks]
        self._wanted = dict.fromkeys(wanted) if self._in_place else {}
        """Graphs to build ahead."""

    def takes(self, cache: list[Any]) -> bool:
        """Whether it takes a batch with these layers."""
        return self.works and all(type(layer) in (KVCache, RowsKVCache) for layer in cache)

    def takes_chunk(self, cache: list[Any], num_tokens: int, inputs: Mapping[str, Any]) -> bool:
        """Whether it takes a chunk of so many tokens, with these inputs."""
        are_known = bool(self._sides) and inputs.keys() <= _TOKEN_AXES.keys()
        return are_known and num_tokens <= _CHUNKS[-1] and self.takes(cache)

    def step(
        self, token_ids: mx.array, cache: list[Any], position_ids: dict[str, mx.array]
    ) -> mx.array | None:
        """Append `token_ids`, (rows, tokens), to `cache`: their logits, (rows, tokens, vocabulary).

        See `_launch`.
        """
        rows, count = token_ids.shape
        self._wanted.pop(_Shape(rows, count), None)
        return self._launch(token_ids, cache, position_ids, count, None)

    def prefill(
        self, token_ids: mx.array, cache: list[Any], inputs: dict[str, mx.array], capacity: int
    ) -> mx.array | None:
        """Append `token_ids`, (1, tokens), to `cache`; empty layers get buffers of `capacity`.

        Returns the last one's logits, (1, 1, vocabulary). See `_launch`.
        """
        num_new = token_ids.shape[1]
        count = next(size for size in _CHUNKS if size >= num_new)
        if cache[0].keys is None:
            for layer, sides in zip(cache, self._empty_sides(1, capacity), strict=True):
                layer.keys, layer.values = sides
        self._wanted.pop(_Shape(1, count, is_prefill=True), None)
        if not self._inputs:
            self._inputs = {
                name: _first(value, _TOKEN_AXES[name]) for name, value in inputs.items()
            }
            mx.eval(self._inputs)
        inputs = {name: _padded(value, _TOKEN_AXES[name], count) for name, value in inputs.items()}
        last = mx.array([num_new - 1])
        return self._launch(_padded(token_ids, 1, count), cache, inputs, num_new, last)

    def plan_next(self) -> bool:
        """Build a graph that may be needed. False if none is left."""
        shape = next((s for s in self._wanted if self._inputs or not s.is_prefill), None)
        if shape is None or not self._sides:
            return False
        del self._wanted[shape]
        inputs = next_position_ids(self._positions, [0] * shape.rows, shape.count)
        if shape.is_prefill:
            inputs = {
                name: _padded(value, _TOKEN_AXES[name], shape.count)
                for name, value in self._inputs.items()
            }
        tokens = mx.zeros((shape.rows, shape.count), mx.int32)
        bounds = mx.zeros((shape.rows, 3), mx.int32)
        last = mx.array([0]) if shape.is_prefill else None
        self._compiled(tokens, bounds, inputs, self._empty_sides(shape.rows, VIEW_TOKENS), last)
        return True

    def _empty_sides(self, rows: int, capacity: int) -> Sides:
        """New buffers, lazy."""
        return [
            (_zeros(keys, rows, capacity), _zeros(values, rows, capacity))
            for keys, values in self._sides
        ]

    def _launch(
        self,
        token_ids: mx.array,
        cache: list[Any],
        inputs: dict[str, mx.array],
        num_new: int,
        places: mx.array | None,
    ) -> mx.array | None:
        """Append `num_new` tokens of each row, and return logits: at `places`, or of all tokens.

        They are launched when this returns, so that whatever anyone asks of `cache` comes after
        that on the stream. None if the model can't be compiled, and nothing was done.
        """
        for layer in cache:
            make_room(layer, num_new if self._in_place else token_ids.shape[1])
        bounds = mx.array([(start, end + num_new, num_new) for start, end in bounds_of(cache[0])])
        sides = [
            first_columns(layer) if self._in_place else (layer.keys, layer.values)
            for layer in cache
        ]
        try:
            logits, new = self._compiled(token_ids, bounds, inputs, sides, places)
            if not self._sides:
                mx.eval(logits)  # compiles the kernels, if that is possible
        except Exception:
            logger.warning("this model can't be compiled", exc_info=True)
            self.works, self._wanted = False, {}
            return None
        for layer, (keys, values) in zip(cache, new or sides, strict=True):
            if new:
                layer.keys, layer.values = keys, values
            advance(layer, num_new)
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        if not self._sides:
            self._sides = [(_first(keys, 2), _first(values, 2)) for keys, values in sides]
            mx.eval(self._sides)
        return logits  # type: ignore[no-any-return]

    def _run(
        self,
        token_ids: mx.array,
        bounds: mx.array,
        inputs: dict[str, mx.array],
        sides: Sides,
        places: mx.array | None,
    ) -> tuple[mx.array, Sides]:
        """Logits, and the new buffers if they are new."""
        layers = [BoundedLayer(*each, bounds, in_place=self._in_place) for each in sides]
        model = self._language_model
        wanted = logits_of_last(model, token_ids.shape[1])
        with wanted if places is None else logits_at(model, places), self._attention.in_place():
            output = model(token_ids, cache=layers, **inputs)
        if not all(layer.is_read for layer in layers):
            raise NotImplementedError("it attends in a way of its own")
        new = [] if self._in_place else [(layer.keys, layer.values) for layer in layers]
        return output.logits, new


def _first(array: mx.array, axis: int) -> mx.array:
    """A copy of the first entry along `axis`, of the first row."""
    return mx.contiguous(mx.take(array, mx.array([0]), axis=axis))


def _zeros(like: mx.array, rows: int, capacity: int) -> mx.array:
    _, heads, _, size = like.shape
    return mx.zeros((rows, heads, capacity, size), like.dtype)


def _padded(array: mx.array, axis: int, count: int) -> mx.array:
    """`array` with zeros after it, up to `count` entries along `axis`."""
    widths = [(0, 0)] * array.ndim
    widths[axis] = 0, count - array.shape[axis]
    return mx.pad(array, widths)
