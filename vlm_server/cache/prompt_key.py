"""What a prefix is made of, compared exactly. Knows token ids and keys; knows no model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """PromptKey `start` to `end` (exclusive), which stand for what `key` names, whatever their ids.

    Two spans are the same if their keys and lengths are.
    """

    start: int
    end: int
    key: str


@dataclass(frozen=True, slots=True)
class PromptKey:
    """A stretch of a prompt: token ids (elements,) int32, and the spans in it, in order."""

    token_ids: NDArray[np.int32]
    spans: tuple[MediaSpan, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def first(self) -> int | str:
        """See `key_at`."""
        return self.key_at(0)

    def key_at(self, place: int) -> int | str:
        """What tells an element that is not inside a span from others: a key or a token id."""
        keys = (span.key for span in self.spans if span.start == place)
        return next(keys, int(self.token_ids[place]))

    def part(self, start: int, end: int) -> PromptKey:
        """PromptKey `start` to `end`, neither of which is inside a span."""
        spans = tuple(
            MediaSpan(span.start - start, span.end - start, span.key)
            for span in self._spans_in(start, end)
        )
        return PromptKey(self.token_ids[start:end], spans)

    def floor(self, end: int) -> int:
        """`end`, or where the span begins that `end` is inside of."""
        return next((span.start for span in self.spans if span.start < end < span.end), end)

    def num_common(self, start: int, edge: PromptKey) -> int:
        """How many elements of `edge` those from `start` on begin with; never part of a span."""
        length = min(len(edge), len(self) - start)
        unequal = self.token_ids[start : start + length] != edge.token_ids[:length]
        own = {span.start - start: span for span in self._spans_in(start, start + length)}
        theirs = {span.start: span for span in edge.spans if span.start < length}
        for place in own.keys() | theirs.keys():
            if _are_same(own.get(place), theirs.get(place)):
                unequal[place : place + _length(own[place])] = False
            else:
                unequal[place] = True
        places = np.flatnonzero(unequal)
        return int(places[0]) if len(places) else length

    def _spans_in(self, start: int, end: int) -> Iterator[MediaSpan]:
        return (span for span in self.spans if start <= span.start < end)


NOTHING = PromptKey(np.zeros(0, dtype=np.int32))


def _are_same(one: MediaSpan | None, other: MediaSpan | None) -> bool:
    if one is None or other is None:
        return False
    return one.key == other.key and _length(one) == _length(other)


def _length(span: MediaSpan) -> int:
    return span.end - span.start
