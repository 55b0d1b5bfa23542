"""The KV cache of a layer with a sliding window.

Like a `KVCache` it appends, so that a batch, a compiled step and a step that verifies drafts treat
both alike. When its buffers are full, the columns that no later token attends to are dropped.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import KVCache, RotatingKVCache, create_causal_mask

from vlm_server.cache.kv_storage import EXACT, KVStorage
from vlm_server.runner.backends.rows import Run, arrange
from vlm_server.runner.kv.packed_cache import packs, unpacks


def buffer_capacity(num_tokens: int) -> int:
    """Columns of a buffer for `num_tokens` and at least one more."""
    return int((num_tokens // KVCache.step + 1) * KVCache.step)


class WindowKVCache(RotatingKVCache):  # type: ignore[misc]  # mlx-vlm is not typed
    """One sequence's layer in which a token attends to itself and `max_size - 1` tokens before it.

    keys, values: (1, heads, capacity, head size), or packed as `storage` says; column i is token
    `i + num_dropped`. offset: the number of tokens.
    """

    keys: Any
    values: Any

    def __init__(self, max_size: int, storage: KVStorage = EXACT) -> None:
        super().__init__(max_size)
        self.storage = storage
        self.num_dropped = 0
        self._fetched_from = 0

    @property
    def end(self) -> int:
        """The column after the last token."""
        return self.offset - self.num_dropped

    @property
    def first_seen(self) -> int:
        """The first column that the next token attends to."""
        return max(self.end - self.max_size + 1, 0)

    @packs
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `keys` and `values`, (1, heads, tokens, head size).

        Returns the columns that the first of the new tokens attends to, and all after them.
        """
        count = keys.shape[2]
        if self.keys is None:
            shape = (*keys.shape[:2], buffer_capacity(count))
            self.keys = mx.zeros((*shape, keys.shape[3]), keys.dtype)
            self.values = mx.zeros((*shape, values.shape[3]), values.dtype)
        self.make_room(count)
        start, end = self.end, self.end + count
        first = self.first_seen
        self.keys[..., start:end, :] = keys
        self.values[..., start:end, :] = values
        self.offset += count
        self._fetched_from = first
        return self.keys[..., first:end, :], self.values[..., first:end, :]

    def make_room(self, count: int) -> None:
        """Make room for `count` more tokens; drops the columns before `first_seen` if it must."""
        if max(self.end + count, KVCache.step) > self.keys.shape[2]:
            self._drop_unseen(count)

    def shrink(self) -> None:
        """Free the columns that no later token attends to, after a long chunk."""
        if self.keys is not None and self.keys.shape[2] > buffer_capacity(self.max_size):
            self._drop_unseen(1)

    def _drop_unseen(self, count: int) -> None:
        """Drop the columns before `first_seen`, and make room for `count` more tokens."""
        first, length = self.first_seen, self.end - self.first_seen
        runs, capacity = [Run(0, 1, first, length)], buffer_capacity(length + count)
        self.keys, self.values = arrange([(self.keys, self.values)], runs, capacity)
        self.num_dropped += first
        self._fetched_from = 0

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """The mask of `N` new tokens to the columns that `update_and_fetch` returns."""
        window_size = window_size or self.max_size
        num_before = self.end - self.first_seen
        if N == 1:
            is_all = num_before < window_size
            return None if is_all else mx.arange(num_before + 1) > num_before - window_size
        if num_before + N > window_size or return_array:
            mask: mx.array = create_causal_mask(N, num_before, window_size=window_size)
            return mask
        return "causal"

    def extract(self, _: int, num_after: int = 0) -> WindowKVCache:
        """A copy without the last `num_after` tokens, all of them of the last chunk.

        It has only the columns that its next token attends to.
        """
        copy = WindowKVCache(self.max_size, self.storage)
        end = self.end - num_after
        first = max(end - self.max_size + 1, 0)
        if self.keys is not None:
            runs, length = [Run(0, 1, first, end - first)], end - first
            copy.keys, copy.values = arrange([(self.keys, self.values)], runs, length)
        copy.offset, copy.num_dropped = self.offset - num_after, self.num_dropped + first
        return copy

    @property
    @unpacks
    def state(self) -> tuple[Any, Any]:
        """Keys and values of the columns in use, as the last `update_and_fetch` returned them."""
        if self.keys is None:
            return self.keys, self.values
        columns = slice(self._fetched_from, self.end)
        return self.keys[..., columns, :], self.values[..., columns, :]

    @property
    def meta_state(self) -> tuple[str, ...]:
        return tuple(map(str, (self.max_size, self.offset, self.num_dropped)))

    @meta_state.setter
    def meta_state(self, numbers: tuple[str, ...]) -> None:
        self.max_size, self.offset, self.num_dropped = map(int, numbers)

    def trim(self, n: int) -> int:
        """Remove the last `n` tokens, which must be in the columns that the last step wrote."""
        self.offset -= n
        return n

    def size(self) -> int:
        return min(self.offset, self.max_size)
