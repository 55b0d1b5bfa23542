"""Prompts small enough to write down, and what each of their positions is.

An item is a token id, or a media span: key, length and the id that all its tokens have.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from weakref import WeakSet

import numpy as np

from vlm_server.cache.prompt_key import MediaSpan, PromptKey

Item = int | tuple[str, int, int]
Part = int | tuple[str, int, int]
"""What a position is: a token id, or key, index and length of a media span."""
Parts = tuple[Part, ...]


class CountedSalts:
    """Makes salts, and counts those that anything still refers to."""

    class _Salt(str):
        """A string that can be referred to weakly."""

    def __init__(self) -> None:
        self._salts: WeakSet[CountedSalts._Salt] = WeakSet()

    def new(self, name: str) -> str:
        salt = self._Salt(name)
        self._salts.add(salt)
        return salt

    @property
    def num_alive(self) -> int:
        gc.collect()
        return len(self._salts)


def prompt_of(items: Iterable[Item]) -> PromptKey:
    ids, spans = list[int](), list[MediaSpan]()
    for item in items:
        if isinstance(item, int):
            ids.append(item)
            continue
        key, length, token_id = item
        spans.append(MediaSpan(len(ids), len(ids) + length, key))
        ids += [token_id] * length
    return PromptKey(np.array(ids, dtype=np.int32), tuple(spans))


def parts_of(prompt_key: PromptKey) -> Parts:
    parts: list[Part] = [int(token_id) for token_id in prompt_key.token_ids]
    for span in prompt_key.spans:
        length = span.end - span.start
        parts[span.start : span.end] = [(span.mm_hash, index, length) for index in range(length)]
    return tuple(parts)


def is_boundary(parts: Parts, position: int) -> bool:
    """Whether `position` is not inside a span."""
    after = parts[position] if position < len(parts) else 0
    return isinstance(after, int) or after[1] == 0


def num_common(one: Parts, other: Parts, limit: int) -> int:
    """The length of the common prefix, `limit` at most; it never ends within a span."""
    longest = min(len(one), len(other), limit)
    return max(n for n in range(longest + 1) if one[:n] == other[:n] and is_boundary(one, n))
