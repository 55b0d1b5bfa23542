"""Prefill chunks, which are padded where they should have few shapes.

CUDA plans attention anew for each number of queries and keys, and prompts have all lengths
(`runner.backends.cuda.attention`). A padded chunk starts and ends at multiples of the padding.
Padding after the chunk is masked by causal attention. Positions before it are of tokens that the
cache already holds; their queries' results are not used.

CUDA's causal attention requires the last query at the last key, and a mask would cost more than it
saves, so padding is computed like tokens. On an H200, 256 tokens take as long as 64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_vlm.models.cache import KVCache

from vlm_server.runner.model.adapters import ADAPTERS

TOKEN_AXES = {
    "inputs_embeds": 1,
    "per_layer_inputs": 1,
    "visual_pos_masks": 1,
    "deepstack_visual_embeds": 1,
    "position_ids": 2,
    ADAPTERS: 1,
}
"""Axis of tokens in array arguments; a list of deepstack has rows of visual tokens alone."""


class StepOutput(NamedTuple):
    """The result of a step for some rows; lazy.

    logits: (rows, tokens, vocabulary), of all tokens, or of the last alone. hidden: the states of
    all tokens from which logits are computed, (rows, tokens, hidden); None if they are not kept.
    states: at each of a chunk's points, those of its layers with states.
    """

    logits: mx.array
    hidden: mx.array | None
    states: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """The next tokens of one prompt, for one call of the language model.

    token_ids: (1, tokens). inputs: further arguments of the model, with an entry for each token.
    cache: the prompt's layers, whose buffers have `capacity` columns once there are any. points:
    numbers of tokens after which states are kept: see `PreparedPrompt.points_inside`.
    """

    token_ids: mx.array
    inputs: dict[str, Any]
    cache: list[Any]
    capacity: int
    points: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[1]

    def padded(self, before: int, after: int) -> tuple[mx.array, dict[str, Any]]:
        """The token ids and inputs, with padding before and after the tokens."""
        ids = _pad(self.token_ids, 1, before, after)
        return ids, pad_inputs(self.inputs, before, after)


@dataclass(frozen=True, slots=True)
class PaddedChunk:
    """Tokens `start` to `end` of a prompt, as a chunk of positions `first` to `last`."""

    start: int
    end: int
    first: int
    last: int

    @classmethod
    def around(cls, start: int, end: int, multiple: int) -> PaddedChunk:
        """The smallest chunk with these tokens that starts and ends at multiples.

        A single token is not padded: it has a kernel of its own.
        """
        if end - start == 1:
            multiple = 1
        return cls(start, end, start // multiple * multiple, -(-end // multiple) * multiple)

    @property
    def is_exact(self) -> bool:
        return (self.first, self.last) == (self.start, self.end)

    @property
    def num_before(self) -> int:
        """Padding before the first token."""
        return self.start - self.first

    @property
    def num_after(self) -> int:
        """Padding after the last token."""
        return self.last - self.end


class PaddedChunkCache(KVCache):  # type: ignore[misc]  # mlx-vlm is not typed
    """The stand-in for one layer's `cache` during a padded chunk, which writes the KV into it."""

    def __init__(self, cache: KVCache, chunk: PaddedChunk) -> None:
        super().__init__()
        self.offset = chunk.first
        self._cache, self._chunk = cache, chunk

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append the tokens' part of `keys` and `values`, (1, heads, positions, head size).

        Returns all columns up to the padded chunk's end, including padding after the tokens.
        """
        cache, chunk = self._cache, self._chunk
        if cache.keys is None:
            cache.keys, cache.values = (
                mx.zeros((*side.shape[:2], cache.step, side.shape[3]), side.dtype)
                for side in (keys, values)
            )
        new = slice(chunk.num_before, None)
        cache.keys[..., chunk.start : chunk.last, :] = keys[..., new, :]
        cache.values[..., chunk.start : chunk.last, :] = values[..., new, :]
        cache.offset = chunk.end
        return cache.keys[..., : chunk.last, :], cache.values[..., : chunk.last, :]


def pad_inputs(inputs: dict[str, Any], before: int, after: int) -> dict[str, Any]:
    """Arguments of a language model, with padding in those that have an entry for each token.

    It repeats the first and the last entry: of zeros, some models make NaN.
    """
    return {
        name: _pad(value, TOKEN_AXES[name], before, after)
        if name in TOKEN_AXES and isinstance(value, mx.array)
        else value
        for name, value in inputs.items()
    }


def _pad(array: mx.array, axis: int, before: int, after: int) -> mx.array:
    widths = [(0, 0)] * array.ndim
    widths[axis] = before, after
    return mx.pad(array, widths, "edge")
