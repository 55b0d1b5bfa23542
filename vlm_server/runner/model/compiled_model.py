"""Compiled steps of a language model: traced once for each shape, and replayed by the host.

A compiled step has fixed shapes, while KV grows with each token. So the model gets each layer's
whole buffers, and the bounds of each row's tokens as an array on the device. There is a compiled
step for each number of rows and of tokens. On CUDA, our attention writes and reads the buffers
through views of their first columns, so that their size does not matter; elsewhere, each size has
compiled steps of its own.

A mixed step decodes and prefills a piggybacked chunk of a prompt in one forward pass: the weights
are read once for both, and the decoding sequences hardly wait.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
from mlx_vlm.models.cache import KVCache

from vlm_server.runner.backends.bounded_layer import VIEW_TOKENS, first_columns, forget_columns
from vlm_server.runner.backends.cuda.attention import BLOCK_TOKENS
from vlm_server.runner.backends.interface import MAX_DRAFTING_ROWS
from vlm_server.runner.device.arrays import is_out_of_memory
from vlm_server.runner.kv.batch_cache import RowsKVCache, advance, bounds_of, make_room
from vlm_server.runner.model.attention import ModelAttention
from vlm_server.runner.model.chunks import TOKEN_AXES, PaddedChunk, PromptChunk, padded_inputs
from vlm_server.runner.model.forward_pass import Embed, ForwardPass, KVBuffers
from vlm_server.runner.model.mrope import DecodePositions, next_position_ids
from vlm_server.runner.model.text_model import TextModel

logger = logging.getLogger(__name__)

_MAX_ROWS = 32
"""Maximum rows of a step that is precompiled."""

_CHUNKS = (1, 32, 128, *range(256, 2049, 256))
"""Numbers of tokens of compiled prefill chunks."""
_SHORT_CHUNK = 128
"""Maximum tokens of a chunk that is compiled at any distance from the prompt's start."""
_MAX_KEYS = 4096
"""Maximum keys of longer chunks. With more, MLX's own attention is faster, once planned."""
_MAX_SHARE_OF_ROWS = 0.25
"""Maximum rows of a mixed step, as a share of its tokens: more would leave chunks no room."""
_INPUTS = frozenset({"inputs_embeds", "position_ids"})
"""The arguments in `TOKEN_AXES` that compiled steps support."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """The shape of a compiled step of `count` tokens.

    `count` is per row of `rows` (step), of one prompt (chunk), or in all: one for each of `rows`,
    and the others of a prompt (mixed).
    """

    rows: int
    count: int
    kind: Literal["step", "chunk", "mixed"] = "step"


@dataclass(frozen=True, slots=True)
class _WriteTarget:
    """The columns of `cache` for `num_new` tokens of each row."""

    cache: list[Any]
    num_new: int
    bounds: mx.array
    buffers: KVBuffers

    def advance(self, new: KVBuffers) -> None:
        """Count the written tokens; `new` are the buffers, if they were not written in target."""
        for number, layer in enumerate(self.cache):
            if new:
                layer.keys, layer.values = new[number]
            advance(layer, self.num_new)


class CompiledModel(TextModel):
    """A language model with compiled steps, where it and its cache support them."""

    def __init__(
        self,
        language_model: Any,
        attention: ModelAttention,
        positions: DecodePositions,
        draft_widths: Sequence[int],
        embed: Embed | None = None,
        mixed_step_tokens: int = 0,
    ) -> None:
        """`embed`: see `plain_embedding`. `draft_widths`, `mixed_step_tokens`: see `Backend`."""
        super().__init__(language_model, attention)
        self._positions = positions
        self._in_place = attention.attention.appends_in_place
        self._tokens_per_pass = 0 if embed is None else mixed_step_tokens
        forward = ForwardPass(language_model, attention, embed)
        self._step: Any = mx.compile(forward.run)
        self._mixed: Any = mx.compile(forward.run_mixed)
        self.can_compile = True
        """False after the model was found not to compile."""
        self._column: KVBuffers = []
        """One column of the first call's buffers: the pattern for precompiled steps."""
        self._inputs: dict[str, mx.array] = {}
        """One token of the first chunk's inputs: the pattern for precompiled chunks."""
        self._supports_media = True
        """False after a chunk with media had unsupported arguments."""
        self._wanted = dict.fromkeys(self._shapes(draft_widths) if self._in_place else ())
        """Shapes to precompile."""

    def _shapes(self, draft_widths: Sequence[int]) -> list[_Shape]:
        """The likeliest first: those of one request, then of some at the same time."""
        rows = range(1, _MAX_ROWS + 1)
        wide = [_Shape(rows, n) for rows in range(1, MAX_DRAFTING_ROWS + 1) for n in draft_widths]
        chunks = [_Shape(1, count, "chunk") for count in _CHUNKS]
        count = self._tokens_per_pass
        few = [number for number in rows if number <= _MAX_SHARE_OF_ROWS * count]
        mixed = [_Shape(number, count, "mixed") for number in few]
        shapes = [*(_Shape(number, 1) for number in rows), *chunks, *wide, *mixed]
        return sorted(shapes, key=lambda shape: (shape.rows > 1, shape.rows > MAX_DRAFTING_ROWS))

    def _supports(self, cache: list[Any]) -> bool:
        return self.can_compile and all(type(layer) in (KVCache, RowsKVCache) for layer in cache)

    def _supports_chunk(self, chunk: PromptChunk) -> bool:
        """Whether there is a compiled step for this chunk alone.

        Long chunks far into a prompt are left to the model's attention, once that is planned.
        """
        count = chunk.num_tokens
        if count > _CHUNKS[-1] or not self._supports_inputs(chunk):
            return False
        end = chunk.cache[0].offset + count
        if count <= _SHORT_CHUNK or end <= _MAX_KEYS:
            return True
        padded = PaddedChunk.around(end - count, end, BLOCK_TOKENS)
        return not self._attention.attention.is_precompiled(padded.last - padded.first, padded.last)

    def max_piggybacked_tokens(self, rows: int, *, has_media: bool) -> int:
        is_known = (
            self.can_compile and bool(self._inputs) and (self._supports_media or not has_media)
        )
        count = self._tokens_per_pass
        return count - rows if is_known and rows <= _MAX_SHARE_OF_ROWS * count else 0

    def step(
        self,
        token_ids: mx.array,
        cache: list[Any],
        position_ids: dict[str, mx.array],
        chunk: PromptChunk | None = None,
    ) -> tuple[mx.array, mx.array | None]:
        """See `TextModel`; a compiled step if possible."""
        if self._supports(cache):
            made = self._compiled_step(token_ids, cache, position_ids, chunk)
            if made is not None:
                return made
        forget_columns(cache)
        return super().step(token_ids, cache, position_ids)

    def _compiled_step(
        self,
        token_ids: mx.array,
        cache: list[Any],
        position_ids: dict[str, mx.array],
        chunk: PromptChunk | None,
    ) -> tuple[mx.array, mx.array | None] | None:
        """The result of `step`; None if `_launch` failed."""
        rows, count = token_ids.shape
        if chunk is not None and count == 1 and self._supports_inputs(chunk):
            has_room = chunk.num_tokens <= self.max_piggybacked_tokens(rows, has_media=False)
            made = self._mixed_step(token_ids, cache, position_ids, chunk) if has_room else None
            if made is not None:
                return made
        self._wanted.pop(_Shape(rows, count), None)
        target = self._target(cache, count, count)
        logits = self._launch(token_ids, target, position_ids, None)
        return None if logits is None else (logits, None)

    def prefill(self, chunk: PromptChunk) -> mx.array | None:
        """See `TextModel`; None also if `_launch` failed."""
        if not self._supports_chunk(chunk):
            return None
        num_new = chunk.num_tokens
        count = next(size for size in _CHUNKS if size >= num_new)
        self._make_buffers(chunk)
        self._wanted.pop(_Shape(1, count, "chunk"), None)
        if not self._inputs:
            self._inputs = {
                name: _first(value, TOKEN_AXES[name]) for name, value in chunk.inputs.items()
            }
            mx.eval(self._inputs)
        target = self._target(chunk.cache, num_new, count)
        token_ids, inputs = chunk.padded(0, count - num_new)
        return self._launch(token_ids, target, inputs, mx.array([num_new - 1]))

    def precompile_next(self) -> bool:
        shape = next((s for s in self._wanted if self._inputs or s.kind == "step"), None)
        if shape is None or not self._column:
            return False
        del self._wanted[shape]
        if shape.kind == "step":
            self._step(*self._some_rows(shape.rows, shape.count), None)
        elif shape.kind == "chunk":
            self._step(*self._some_prompt(shape.count), mx.array([0]))
        else:
            prompt = self._some_prompt(shape.count - shape.rows)
            self._mixed(*self._some_rows(shape.rows, 1), *prompt, mx.arange(shape.rows + 1))
        return True

    def _some_rows(self, rows: int, count: int) -> tuple[Any, ...]:
        """Arguments of `ForwardPass.run` for rows: zeros in the shapes of real ones, lazy."""
        positions = next_position_ids(self._positions, [0] * rows, count)
        return self._some_tokens(rows, count, positions)

    def _some_prompt(self, count: int) -> tuple[Any, ...]:
        """Arguments of `ForwardPass.run` for a prompt's chunk: zeros, lazy."""
        return self._some_tokens(1, count, padded_inputs(self._inputs, 0, count - 1))

    def _some_tokens(self, rows: int, count: int, inputs: dict[str, mx.array]) -> tuple[Any, ...]:
        bounds, buffers = mx.zeros((rows, 3), mx.int32), self._empty_buffers(rows, VIEW_TOKENS)
        return mx.zeros((rows, count), mx.int32), bounds, buffers, inputs

    def _empty_buffers(self, rows: int, capacity: int) -> KVBuffers:
        """New buffers, lazy."""

        def zeros(like: mx.array) -> mx.array:
            _, heads, _, size = like.shape
            return mx.zeros((rows, heads, capacity, size), like.dtype)

        return [(zeros(keys), zeros(values)) for keys, values in self._column]

    def _make_buffers(self, chunk: PromptChunk) -> None:
        """Make the buffers of the prompt's layers, if they have none."""
        if chunk.cache[0].keys is None:
            made = self._empty_buffers(1, chunk.capacity)
            for layer, buffers in zip(chunk.cache, made, strict=True):
                layer.keys, layer.values = buffers

    def _supports_inputs(self, chunk: PromptChunk) -> bool:
        are_known = chunk.inputs.keys() <= _INPUTS
        self._supports_media &= are_known
        return are_known and bool(self._column) and self._supports(chunk.cache)

    def _target(self, cache: list[Any], num_new: int, count: int) -> _WriteTarget:
        """The target of `num_new` tokens of each row in a step of `count`; makes room."""
        for layer in cache:
            make_room(layer, num_new if self._in_place else count)
        bounds = mx.array([(start, end + num_new, num_new) for start, end in bounds_of(cache[0])])
        buffers = [
            first_columns(layer) if self._in_place else (layer.keys, layer.values)
            for layer in cache
        ]
        return _WriteTarget(cache, num_new, bounds, buffers)

    def _launch(
        self,
        token_ids: mx.array,
        target: _WriteTarget,
        inputs: dict[str, mx.array],
        logit_places: mx.array | None,
    ) -> mx.array | None:
        """Launch a step that appends tokens at `target`.

        Returns the logits of each row's token at `logit_places`, or of all tokens, lazy. None if
        memory was short or the model can't be compiled, and nothing was done.
        """
        try:
            logits, new = self._step(token_ids, target.bounds, target.buffers, inputs, logit_places)
            if not self._column:
                mx.eval(logits)  # compiles the kernels, if that is possible
        except Exception as error:
            if is_out_of_memory(error):
                logger.warning("a compiled step had no memory", exc_info=True)
            else:
                logger.warning("this model can't be compiled", exc_info=True)
                self.can_compile, self._wanted = False, {}
            return None
        target.advance(new)
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        if not self._column:
            self._column = [(_first(keys, 2), _first(values, 2)) for keys, values in target.buffers]
            mx.eval(self._column)
        return logits  # type: ignore[no-any-return]

    def _mixed_step(
        self,
        token_ids: mx.array,
        cache: list[Any],
        position_ids: dict[str, mx.array],
        chunk: PromptChunk,
    ) -> tuple[mx.array, mx.array] | None:
        """A mixed step: see `TextModel.step`. None if it failed, and nothing was done."""
        rows, count = len(token_ids), self._tokens_per_pass - len(token_ids)
        logit_rows = mx.array([*range(rows), rows + chunk.num_tokens - 1])
        try:
            self._make_buffers(chunk)
            mine = self._target(cache, 1, 1)
            theirs = self._target(chunk.cache, chunk.num_tokens, count)
            prompt_ids, inputs = chunk.padded(0, count - chunk.num_tokens)
            rows_arguments = token_ids, mine.bounds, mine.buffers, position_ids
            prompt_arguments = prompt_ids, theirs.bounds, theirs.buffers, inputs
            logits, new = self._mixed(*rows_arguments, *prompt_arguments, logit_rows)
            mx.async_eval(logits)  # type: ignore[no-untyped-call]
        except Exception as error:
            logger.warning("a mixed step failed", exc_info=True)
            if not is_out_of_memory(error):
                self._tokens_per_pass = 0
                shapes = [shape for shape in self._wanted if shape.kind != "mixed"]
                self._wanted = dict.fromkeys(shapes)
            return None
        self._wanted.pop(_Shape(rows, self._tokens_per_pass, "mixed"), None)
        for target, buffers in zip((mine, theirs), new, strict=True):
            target.advance(buffers)
        return logits[:rows], logits[rows:]


def _first(array: mx.array, axis: int) -> mx.array:
    """A copy of the first entry along `axis`, of the first row."""
    return mx.contiguous(mx.take(array, mx.array([0]), axis=axis))
