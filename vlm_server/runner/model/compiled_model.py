"""Compiled steps of a language model: traced once for each shape, and replayed by the host.

A compiled step has fixed shapes, while KV grows with each token. So the model gets each layer's
whole buffers, and where each row's tokens are in them as numbers on the device. There is a compiled
step for each number of rows and of tokens. On CUDA, our attention writes and reads the buffers
through views of their first columns, so that their size does not matter; elsewhere, there is a
compiled step for each size, too.

A mixed step decodes, and reads a piggybacked chunk of a prompt in the same pass: the weights are
read once for both, and the decoding sequences hardly wait.
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
from vlm_server.runner.model.forward_pass import Embed, ForwardPass, Sides
from vlm_server.runner.model.mrope import DecodePositions, next_position_ids
from vlm_server.runner.model.text_model import TextModel

logger = logging.getLogger(__name__)

_MAX_ROWS = 32
"""Most rows of a step that is compiled ahead."""

_CHUNKS = (1, 32, 128, *range(256, 2049, 256))
"""Numbers of tokens of compiled prefill chunks."""
_SHORT_CHUNK = 128
"""Up to so many tokens, a chunk is compiled however far into a prompt it is."""
_MAX_KEYS = 4096
"""Most keys of longer chunks. With more, MLX's own attention is faster, once it is planned."""
_MAX_SHARE_OF_ROWS = 0.25
"""Most rows of a mixed step, as a share of its tokens: with more, hardly a chunk would fit."""
_INPUTS = frozenset({"inputs_embeds", "position_ids"})
"""Arguments of compiled steps, of those in `TOKEN_AXES`."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """The shape of a compiled step, which appends `count` tokens.

    To each of `rows` (step), to one prompt (chunk), or in all to `rows`, one each, and to a prompt
    (mixed).
    """

    rows: int
    count: int
    kind: Literal["step", "chunk", "mixed"] = "step"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where `num_new` tokens of each row of `cache` go."""

    cache: list[Any]
    num_new: int
    bounds: mx.array
    sides: Sides

    def advance(self, new: Sides) -> None:
        """Count the tokens, which were written there; into the buffers `new`, if there are any."""
        for number, layer in enumerate(self.cache):
            if new:
                layer.keys, layer.values = new[number]
            advance(layer, self.num_new)


class CompiledModel(TextModel):
    """A language model with compiled steps, if its layers only append and it can be compiled."""

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
        self.works = True
        """False once it was found that the model can't be compiled."""
        self._sides: Sides = []
        """One column of the first call's buffers, whose shapes steps compiled ahead take."""
        self._inputs: dict[str, mx.array] = {}
        """One token of the first chunk's inputs, likewise."""
        self._takes_media = True
        """Whether media bring no further arguments, as far as is known."""
        self._wanted = dict.fromkeys(self._shapes(draft_widths) if self._in_place else ())
        """Steps to compile ahead."""

    def _shapes(self, draft_widths: Sequence[int]) -> list[_Shape]:
        rows = range(1, _MAX_ROWS + 1)
        wide = [_Shape(rows, n) for rows in range(1, MAX_DRAFTING_ROWS + 1) for n in draft_widths]
        chunks = [_Shape(1, count, "chunk") for count in _CHUNKS]
        count = self._tokens_per_pass
        few = [number for number in rows if number <= _MAX_SHARE_OF_ROWS * count]
        mixed = [_Shape(number, count, "mixed") for number in few]
        return [*(_Shape(number, 1) for number in rows), *wide, *chunks, *mixed]

    def _takes(self, cache: list[Any]) -> bool:
        return self.works and all(type(layer) in (KVCache, RowsKVCache) for layer in cache)

    def _takes_chunk(self, chunk: PromptChunk) -> bool:
        """Whether there is a compiled step for a chunk by itself.

        A long one far into a prompt is left to the model's attention, once that is planned.
        """
        count = chunk.num_tokens
        if count > _CHUNKS[-1] or not self._takes_inputs(chunk):
            return False
        end = chunk.cache[0].offset + count
        if count <= _SHORT_CHUNK or end <= _MAX_KEYS:
            return True
        padded = PaddedChunk.around(end - count, end, BLOCK_TOKENS)
        return not self._attention.attention.is_scheduled(padded.last - padded.first, padded.last)

    def max_piggybacked_tokens(self, rows: int, *, has_media: bool) -> int:
        is_known = self.works and bool(self._inputs) and (self._takes_media or not has_media)
        count = self._tokens_per_pass
        return count - rows if is_known and rows <= _MAX_SHARE_OF_ROWS * count else 0

    def step(
        self,
        token_ids: mx.array,
        cache: list[Any],
        position_ids: dict[str, mx.array],
        chunk: PromptChunk | None = None,
    ) -> tuple[mx.array, mx.array | None]:
        """See `TextModel`; by a compiled step, if that is possible."""
        if self._takes(cache):
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
        """The result of `step`; None: see `_launch`."""
        rows, count = token_ids.shape
        if chunk is not None and count == 1 and self._takes_inputs(chunk):
            has_room = chunk.num_tokens <= self.max_piggybacked_tokens(rows, has_media=False)
            made = self._mixed_step(token_ids, cache, position_ids, chunk) if has_room else None
            if made is not None:
                return made
        self._wanted.pop(_Shape(rows, count), None)
        place = self._place(cache, count, count)
        logits = self._launch(token_ids, place, position_ids, None)
        return None if logits is None else (logits, None)

    def prefill(self, chunk: PromptChunk) -> mx.array | None:
        """See `TextModel`; None also where `_launch` returns it."""
        if not self._takes_chunk(chunk):
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
        place = self._place(chunk.cache, num_new, count)
        token_ids, inputs = chunk.padded(0, count - num_new)
        return self._launch(token_ids, place, inputs, mx.array([num_new - 1]))

    def compile_next(self) -> bool:
        shape = next((s for s in self._wanted if self._inputs or s.kind == "step"), None)
        if shape is None or not self._sides:
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
        bounds, sides = mx.zeros((rows, 3), mx.int32), self._empty_sides(rows, VIEW_TOKENS)
        return mx.zeros((rows, count), mx.int32), bounds, sides, inputs

    def _empty_sides(self, rows: int, capacity: int) -> Sides:
        """New buffers, lazy."""

        def zeros(like: mx.array) -> mx.array:
            _, heads, _, size = like.shape
            return mx.zeros((rows, heads, capacity, size), like.dtype)

        return [(zeros(keys), zeros(values)) for keys, values in self._sides]

    def _make_buffers(self, chunk: PromptChunk) -> None:
        """Make the buffers of the prompt's layers, if they have none."""
        if chunk.cache[0].keys is None:
            made = self._empty_sides(1, chunk.capacity)
            for layer, sides in zip(chunk.cache, made, strict=True):
                layer.keys, layer.values = sides

    def _takes_inputs(self, chunk: PromptChunk) -> bool:
        are_known = chunk.inputs.keys() <= _INPUTS
        self._takes_media &= are_known
        return are_known and bool(self._sides) and self._takes(chunk.cache)

    def _place(self, cache: list[Any], num_new: int, count: int) -> _Place:
        """Where `num_new` tokens of each row go, by a compiled step of `count`; there is room."""
        for layer in cache:
            make_room(layer, num_new if self._in_place else count)
        bounds = mx.array([(start, end + num_new, num_new) for start, end in bounds_of(cache[0])])
        sides = [
            first_columns(layer) if self._in_place else (layer.keys, layer.values)
            for layer in cache
        ]
        return _Place(cache, num_new, bounds, sides)

    def _launch(
        self,
        token_ids: mx.array,
        place: _Place,
        inputs: dict[str, mx.array],
        logit_places: mx.array | None,
    ) -> mx.array | None:
        """Append tokens at `place`, and return logits: of each row's at `logit_places`, or of all.

        The step is launched when this returns: later reads of the cache follow it on the stream.
        None if there was no memory or the model can't be compiled, and nothing was done.
        """
        try:
            logits, new = self._step(token_ids, place.bounds, place.sides, inputs, logit_places)
            if not self._sides:
                mx.eval(logits)  # compiles the kernels, if that is possible
        except Exception as error:
            if is_out_of_memory(error):
                logger.warning("a compiled step had no memory", exc_info=True)
            else:
                logger.warning("this model can't be compiled", exc_info=True)
                self.works, self._wanted = False, {}
            return None
        place.advance(new)
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        if not self._sides:
            self._sides = [(_first(keys, 2), _first(values, 2)) for keys, values in place.sides]
            mx.eval(self._sides)
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
            mine = self._place(cache, 1, 1)
            theirs = self._place(chunk.cache, chunk.num_tokens, count)
            prompt_ids, inputs = chunk.padded(0, count - chunk.num_tokens)
            rows_arguments = token_ids, mine.bounds, mine.sides, position_ids
            prompt_arguments = prompt_ids, theirs.bounds, theirs.sides, inputs
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
        for place, buffers in zip((mine, theirs), new, strict=True):
            place.advance(buffers)
        return logits[:rows], logits[rows:]


def _first(array: mx.array, axis: int) -> mx.array:
    """A copy of the first entry along `axis`, of the first row."""
    return mx.contiguous(mx.take(array, mx.array([0]), axis=axis))
