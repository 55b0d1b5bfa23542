"""Compiled steps of a language model: traced once for each shape, and replayed by the host.

A compiled step has fixed shapes, while KV grows with each token. So the model gets each layer's
whole buffers, and the bounds of each row's tokens as an array on the device. There is a compiled
step for each number of rows and of tokens. On CUDA, our attention writes and reads the buffers
through views of their first columns, so that their size does not matter; elsewhere, each size has
compiled steps of its own.

A layer's states are inputs and outputs of a step. A pass with a chunk of a prompt has each token as
a row of its own, after those of sequences that decode, if there are any: in such a mixed step, the
weights are read once for both, and the decoding sequences hardly wait.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import ArraysCache, KVCache

from vlm_server.runner.backends.bounded_layer import VIEW_TOKENS, first_columns, forget_columns
from vlm_server.runner.device.arrays import is_out_of_memory
from vlm_server.runner.kv.batch_cache import RowsKVCache, bounds_of, make_room
from vlm_server.runner.kv.layers import has_states, new_layers, storage_of
from vlm_server.runner.kv.window_cache import WindowKVCache, buffer_capacity
from vlm_server.runner.model.adapters import ADAPTERS, adapters_of_rows
from vlm_server.runner.model.attention import ModelAttention
from vlm_server.runner.model.chunks import (
    TOKEN_AXES,
    PaddedChunk,
    PromptChunk,
    StepOutput,
    pad_inputs,
)
from vlm_server.runner.model.forward_pass import (
    Buffers,
    Embed,
    ForwardPass,
    Inputs,
    LayerKind,
    ModelArguments,
    Rows,
    Target,
    output_of_prompt,
    output_of_rows,
)
from vlm_server.runner.model.mrope import DecodePositions, next_position_ids
from vlm_server.runner.model.state_modules import states_ignore_padding
from vlm_server.runner.model.step_shapes import CHUNKS, MAX_SHARE_OF_ROWS, StepShape, all_shapes
from vlm_server.runner.model.text_model import TextModel

logger = logging.getLogger(__name__)

_ROWS_OF_KERNELS = 2
"""Rows of the steps whose kernels are compiled too: steps of more rows have the same ones."""

_SHORT_CHUNK = 128
"""Maximum tokens of a chunk that is compiled at any distance from the prompt's start."""
_MAX_KEYS = 4096
"""Maximum keys of longer chunks. With more, MLX's own attention is faster, once planned."""
_LAYERS = (KVCache, WindowKVCache, RowsKVCache, ArraysCache)


class CompiledModel(TextModel):
    """A language model with compiled steps, where it and its cache support them."""

    def __init__(
        self,
        language_model: Any,
        attention: ModelAttention,
        positions: DecodePositions,
        draft_widths: Sequence[int],
        arguments: ModelArguments,
        embed: Embed | None = None,
        mixed_step_tokens: int = 0,
        max_inner_points: int = 0,
        *,
        has_adapters: bool = False,
        keeps_hidden: bool = False,
    ) -> None:
        """`embed`: see `text_inputs`. `draft_widths`, `mixed_step_tokens`, `max_inner_points`: see
        `Backend`."""
        super().__init__(language_model, attention, keeps_hidden=keeps_hidden)
        self._positions = positions
        self._in_place = attention.attention.appends_in_place
        self._tokens_per_pass = 0 if embed is None else mixed_step_tokens
        layers = new_layers(language_model)
        self._kinds = [_kind_of(layer) for layer in layers]
        self._forward = ForwardPass(
            language_model, attention, self._kinds, arguments, embed, keeps_hidden=keeps_hidden
        )
        self._step: Any = mx.compile(self._forward.run)
        self._prompt_step: Any = mx.compile(self._forward.run_prompt)
        self.can_compile = bool(self._forward.windows) and _can_compile(language_model, layers)
        """False without attention, if padding changes states, with layers of other types, and after
        the model was found not to compile."""
        self._buffer_pattern: Buffers = []
        """One column of each layer's buffers, or its states, of the first call; empty before it."""
        self._input_pattern: Inputs = {}
        """One token of each input that some chunk has had; other chunks get zeros of its shape."""
        if self.can_compile and has_states(layers):
            self.max_inner_points = max_inner_points
        shapes = all_shapes(
            [] if has_states(layers) else draft_widths,
            self._tokens_per_pass,
            has_adapters=has_adapters,
            max_inner_points=self.max_inner_points,
        )
        self._shapes = shapes if self._in_place else []
        self._shapes_to_compile = dict.fromkeys(self._shapes)
        """Shapes to precompile."""

    def _supports(self, cache: list[Any]) -> bool:
        are_known = all(type(layer) in _LAYERS and storage_of(layer).is_exact for layer in cache)
        return self.can_compile and are_known

    def _supports_chunk(self, chunk: PromptChunk) -> bool:
        """Whether there is a compiled step for this chunk alone.

        Long chunks far into a prompt are left to the model's attention, once that is planned.
        """
        count = chunk.num_tokens
        if count > CHUNKS[-1] or not self._supports_inputs(chunk):
            return False
        attending = next(layer for layer in chunk.cache if not isinstance(layer, ArraysCache))
        end = attending.offset + count
        if count <= _SHORT_CHUNK or end <= _MAX_KEYS:
            return True
        attention = self._attention.attention
        padded = PaddedChunk.around(end - count, end, attention.padding_tokens)
        shape = padded.last - padded.first, padded.last
        sizes = [arrays[0].shape[-1] for arrays in self._keys_and_values()]
        return not attention.is_precompiled(*shape, max(sizes))

    def _keys_and_values(self) -> Buffers:
        kinds = zip(self._kinds, self._buffer_pattern, strict=True)
        return [arrays for kind, arrays in kinds if not kind.has_states]

    def max_piggybacked_tokens(self, rows: int) -> int:
        is_known = self.can_compile and bool(self._input_pattern)
        count = self._tokens_per_pass
        return count - rows if is_known and rows <= MAX_SHARE_OF_ROWS * count else 0

    def step(
        self,
        token_ids: mx.array,
        cache: list[Any],
        inputs: dict[str, mx.array],
        chunk: PromptChunk | None = None,
    ) -> tuple[StepOutput, StepOutput | None]:
        """See `TextModel`; a compiled step if possible."""
        if self._supports(cache):
            outputs = self._compiled_step(token_ids, cache, inputs, chunk)
            if outputs is not None:
                return outputs
        forget_columns(cache)
        return super().step(token_ids, cache, inputs)

    def _compiled_step(
        self,
        token_ids: mx.array,
        cache: list[Any],
        inputs: dict[str, mx.array],
        chunk: PromptChunk | None,
    ) -> tuple[StepOutput, StepOutput | None] | None:
        """The result of `step`; None if it failed, and nothing was done."""
        rows, width = token_ids.shape
        if chunk is not None and width == 1 and self._supports_inputs(chunk):
            has_room = chunk.num_tokens <= self.max_piggybacked_tokens(rows)
            outputs = self._mixed_step(token_ids, cache, inputs, chunk) if has_room else None
            if outputs is not None:
                return outputs
        self._shapes_to_compile.pop(StepShape(rows, width, is_adapted=ADAPTERS in inputs), None)
        target = self._target(cache, width, width)
        outputs = None
        with self._fallback():
            launched = self._step(*target.rows(token_ids, inputs))
            if not self._buffer_pattern:
                mx.eval(launched)  # compiles the kernels, if that is possible
            outputs = launched
        if outputs is None:
            return None
        computed, new_kv = outputs
        target.advance(new_kv)
        mx.async_eval(computed, new_kv)  # type: ignore[no-untyped-call]
        if not self._buffer_pattern:
            self._buffer_pattern = [
                tuple((array if kind.has_states else _first(array, 2))[:1] for array in arrays)
                for kind, arrays in zip(self._kinds, target.buffers, strict=True)
            ]
            mx.eval(self._buffer_pattern)
        return output_of_rows(computed), None

    def prefill(self, chunk: PromptChunk) -> StepOutput | None:
        """See `TextModel`; None also if it failed, and nothing was done."""
        if not self._supports_chunk(chunk):
            return None
        num_new = chunk.num_tokens
        count = next(size for size in CHUNKS if size >= num_new)
        outputs = None
        prompt, target = self._prompt_rows(chunk, count)
        with self._fallback():
            points = _points(chunk)
            outputs = self._prompt_step(None, prompt, mx.array([num_new - 1]), points)
        if outputs is None:
            return None
        computed, (_, new_kv, states) = outputs
        shape = StepShape(0, prompt_tokens=count, num_points=len(chunk.points))
        self._shapes_to_compile.pop(shape, None)
        target.advance(new_kv)
        mx.async_eval(computed, new_kv, states)  # type: ignore[no-untyped-call]
        return output_of_prompt(computed, 0, num_new, states)

    def precompile_next(self) -> bool:
        shape = next(
            (s for s in self._shapes_to_compile if self._input_pattern or not s.prompt_tokens), None
        )
        if shape is None or not self._buffer_pattern:
            return False
        del self._shapes_to_compile[shape]
        rows = None
        if shape.rows:
            inputs = next_position_ids(self._positions, [0] * shape.rows, shape.width)
            if shape.is_adapted:
                inputs |= adapters_of_rows([1] * shape.rows)
            rows = self._some_tokens(shape.rows, shape.width, inputs)
        with self._fallback():
            if shape.prompt_tokens:
                prompt_inputs = pad_inputs(self._input_pattern, 0, shape.prompt_tokens - 1)
                prompt = self._some_tokens(1, shape.prompt_tokens, prompt_inputs)
                points = mx.zeros(shape.num_points, mx.int32) if shape.num_points else None
                outputs = self._prompt_step(rows, prompt, mx.arange(shape.rows + 1), points)
            else:
                assert rows is not None
                outputs = self._step(*rows)
            if shape.rows <= _ROWS_OF_KERNELS:
                mx.eval(outputs)
        return True

    def _some_tokens(self, rows: int, count: int, inputs: Inputs) -> Rows:
        """Zeros in the shapes of real tokens, lazy."""
        bounds = [mx.array([[0, count, count]] * rows, mx.int32) for _ in self._forward.windows]
        buffers = [
            arrays if kind.has_states else tuple(side[:, :, :VIEW_TOKENS] for side in arrays)
            for kind, arrays in zip(
                self._kinds,
                self._empty_buffers(rows, max(count, VIEW_TOKENS), count),
                strict=True,
            )
        ]
        return Rows(mx.zeros((rows, count), mx.int32), bounds, buffers, inputs)

    def _empty_buffers(self, rows: int, capacity: int, num_new: int = 0) -> Buffers:
        """New buffers, lazy; those with a window have no more columns than that needs."""

        def zeros(like: mx.array, kind: LayerKind) -> mx.array:
            shape = [rows, *like.shape[1:]]
            if not kind.has_states:
                max_columns = (
                    capacity if kind.window is None else buffer_capacity(kind.window + num_new)
                )
                shape[2] = min(capacity, max_columns)
            return mx.zeros(shape, like.dtype)

        return [
            tuple(zeros(array, kind) for array in arrays)
            for kind, arrays in zip(self._kinds, self._buffer_pattern, strict=True)
        ]

    def _make_buffers(self, chunk: PromptChunk, num_new: int) -> None:
        """Make the buffers of the prompt's layers, if they have none."""
        buffers = self._empty_buffers(1, chunk.capacity, num_new)
        for layer, arrays in zip(chunk.cache, buffers, strict=True):
            if not layer.empty():
                continue
            if isinstance(layer, ArraysCache):
                layer.cache = list(arrays)
            else:
                layer.keys, layer.values = arrays

    def _supports_inputs(self, chunk: PromptChunk) -> bool:
        are_known = chunk.inputs.keys() <= TOKEN_AXES.keys()
        return are_known and bool(self._buffer_pattern) and self._supports(chunk.cache)

    def _prompt_rows(self, chunk: PromptChunk, count: int) -> tuple[Rows, Target]:
        """A chunk's tokens, padded to `count`, and their target."""
        new_inputs = {
            name: _first(value, TOKEN_AXES[name])
            for name, value in chunk.inputs.items()
            if name not in self._input_pattern
        }
        if new_inputs:
            mx.eval(new_inputs)
            self._input_pattern = self._input_pattern | new_inputs
            self._shapes_to_compile = (
                dict.fromkeys(s for s in self._shapes if s.prompt_tokens) | self._shapes_to_compile
            )
        self._make_buffers(chunk, count)
        target = self._target(chunk.cache, chunk.num_tokens, count)
        token_ids, inputs = chunk.padded(0, count - chunk.num_tokens)
        missing_inputs = {
            name: self._input_pattern[name] for name in self._input_pattern if name not in inputs
        }
        zeros = pad_inputs({n: mx.zeros_like(a) for n, a in missing_inputs.items()}, 0, count - 1)
        return target.rows(token_ids, inputs | zeros), target

    def _target(self, cache: list[Any], num_new: int, count: int) -> Target:
        """The target of `num_new` tokens of each row in a step of `count`; makes room."""
        bounds, buffers = dict[int | None, mx.array](), []
        for layer, kind in zip(cache, self._kinds, strict=True):
            if kind.has_states:
                buffers.append(tuple(layer.cache))
                continue
            make_room(layer, num_new if self._in_place else count)
            if kind.window not in bounds:
                rows = [(start, end + num_new, num_new) for start, end in bounds_of(layer)]
                bounds[kind.window] = mx.array(rows)
            buffers.append(first_columns(layer) if self._in_place else (layer.keys, layer.values))
        return Target(cache, num_new, list(bounds.values()), buffers)

    @contextmanager
    def _fallback(self) -> Iterator[None]:
        """Suppress an error in the block. Only if memory was short, more steps are tried."""
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                logger.warning("a compiled step had no memory", exc_info=True)
            else:
                logger.warning("this model can't be compiled", exc_info=True)
                self.can_compile, self._shapes_to_compile = False, {}

    def _mixed_step(
        self,
        token_ids: mx.array,
        cache: list[Any],
        inputs: dict[str, mx.array],
        chunk: PromptChunk,
    ) -> tuple[StepOutput, StepOutput] | None:
        """A mixed step: see `TextModel.step`. None if it failed, and nothing was done."""
        num_rows, count = len(token_ids), self._tokens_per_pass - len(token_ids)
        logit_rows = mx.array([*range(num_rows), num_rows + chunk.num_tokens - 1])
        try:
            decode_target = self._target(cache, 1, 1)
            prompt, prompt_target = self._prompt_rows(chunk, count)
            rows = decode_target.rows(token_ids, inputs)
            outputs = self._prompt_step(rows, prompt, logit_rows, _points(chunk))
            mx.async_eval(outputs)  # type: ignore[no-untyped-call]
        except Exception as error:
            logger.warning("a mixed step failed", exc_info=True)
            if not is_out_of_memory(error):
                self._tokens_per_pass = 0
                self._shapes = [s for s in self._shapes if not (s.rows and s.prompt_tokens)]
                self._shapes_to_compile = {
                    s: None for s in self._shapes_to_compile if s in self._shapes
                }
            return None
        computed, (new_kv, prompt_kv, states) = outputs
        shape = StepShape(
            num_rows,
            prompt_tokens=count,
            is_adapted=ADAPTERS in inputs,
            num_points=len(chunk.points),
        )
        self._shapes_to_compile.pop(shape, None)
        decode_target.advance(new_kv)
        prompt_target.advance(prompt_kv)
        of_prompt = output_of_prompt(computed, num_rows, chunk.num_tokens, states)
        return output_of_rows(computed, num_rows), of_prompt


def _points(chunk: PromptChunk) -> mx.array | None:
    """Those of a chunk; None without any."""
    return mx.array(chunk.points, mx.int32) if chunk.points else None


def _can_compile(language_model: Any, layers: Sequence[Any]) -> bool:
    are_known = all(type(layer) in _LAYERS for layer in layers)
    return are_known and (not has_states(layers) or states_ignore_padding(language_model))


def _kind_of(layer: Any) -> LayerKind:
    if isinstance(layer, ArraysCache):
        return LayerKind(has_states=True)
    return LayerKind(window=getattr(layer, "max_size", None))


def _first(array: mx.array, axis: int) -> mx.array:
    """A copy of the first entry along `axis`, of the first row."""
    return mx.contiguous(mx.take(array, mx.array([0]), axis=axis))
