"""Chunks of prompts within frames of few sizes. Knows mlx-vlm's plain KV cache; knows no request.

On CUDA attention is planned for each number of queries and keys that was not met before, which
takes 35 ms, and hardly two prompts are of one length. A frame begins and ends at multiples of its
size. What it holds around a chunk is masked or thrown away: behind it by causality; before it lie
tokens that the cache has already, and whose queries nobody reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import KVCache

_CUDA_FRAME_TOKENS = 64
_TOKEN_AXES = {"inputs_embeds": 1, "per_layer_inputs": 1, "visual_pos_masks": 1, "position_ids": 2}


def padding_multiple() -> int:
    """What frames are multiples of; 1 where nothing is gained by them."""
    return _CUDA_FRAME_TOKENS if mx.cuda.is_available() else 1


@dataclass(frozen=True, slots=True)
class PaddedChunk:
    """Tokens `start` to `end` of a prompt, in places `first` to `last`."""

    start: int
    end: int
    first: int
    last: int

    @classmethod
    def around(cls, start: int, end: int, multiple: int) -> PaddedChunk:
        """A single token needs none: it has a kernel of its own."""
        if end - start == 1:
            multiple = 1
        return cls(start, end, start // multiple * multiple, -(-end // multiple) * multiple)

    @property
    def is_exact(self) -> bool:
        return (self.first, self.last) == (self.start, self.end)

    @property
    def num_behind(self) -> int:
        """Places that nobody reads, behind the last token."""
        return self.last - self.end

    def filled_up(self, array: mx.array, axis: int) -> mx.array:
        """`array`, with a place for each token along `axis`, and zeros in the places around."""
        widths = [(0, 0)] * array.ndim
        widths[axis] = (self.start - self.first, self.num_behind)
        return mx.pad(array, widths)

    def filled_up_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The same of all arguments of a language model that have a place for each token."""
        return {
            name: self.filled_up(value, _TOKEN_AXES[name]) if name in _TOKEN_AXES else value
            for name, value in inputs.items()
        }


class PaddedChunkCache(KVCache):  # type: ignore[misc]  # mlx-vlm is not typed
    """What a model sees of one layer's cache while it reads a frame; the tokens go into `cache`."""

    def __init__(self, cache: KVCache, frame: PaddedChunk) -> None:
        super().__init__()
        self.offset = frame.first
        self._cache, self._frame = cache, frame

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """`keys` and `values`, (1, heads, places, head size), of the whole frame.

        All up to its end: those before the chunk as they were, zeros' behind it.
        """
        cache, frame = self._cache, self._frame
        if cache.keys is None:
            cache.keys, cache.values = (
                mx.zeros((*side.shape[:2], cache.step, side.shape[3]), side.dtype)
                for side in (keys, values)
            )
        new = slice(frame.start - frame.first, None)
        cache.keys[..., frame.start : frame.last, :] = keys[..., new, :]
        cache.values[..., frame.start : frame.last, :] = values[..., new, :]
        cache.offset = frame.end
        return cache.keys[..., : frame.last, :], cache.values[..., : frame.last, :]
