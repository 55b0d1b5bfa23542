"""The exact identity of a prompt: token ids, and media by their hashes.

A position of a prompt is a token of text or one of the tokens that stand for an image or video.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """The positions `start` to `end` (exclusive) of the media item with hash `mm_hash`.

    Two spans match if their hashes and lengths do; token ids are not compared.
    """

    start: int
    end: int
    mm_hash: str


@dataclass(frozen=True, slots=True)
class PromptKey:
    """A prompt or a part of one: token ids (positions,) int32, and its media spans in order."""

    token_ids: NDArray[np.int32]
    spans: tuple[MediaSpan, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def first(self) -> int | str:
        """The key of the first position, see `key_at`."""
        return self.key_at(0)

    def key_at(self, position: int) -> int | str:
        """The hash of the media span that starts at `position`, else the token id there."""
        keys = (span.mm_hash for span in self.spans if span.start == position)
        return next(keys, int(self.token_ids[position]))

    def part(self, start: int, end: int) -> PromptKey:
        """Positions `start` to `end`, neither of which is inside a span."""
        spans = tuple(
            MediaSpan(span.start - start, span.end - start, span.mm_hash)
            for span in self._spans_in(start, end)
        )
        return PromptKey(self.token_ids[start:end], spans)

    def floor(self, end: int) -> int:
        """`end`, or the start of the span that contains it."""
        return next((span.start for span in self.spans if span.start < end < span.end), end)

    def num_common(self, start: int, edge: PromptKey) -> int:
        """Number of positions of `edge` equal to those from `start` on; never part of a span."""
        length = min(len(edge), len(self) - start)
        unequal = self.token_ids[start : start + length] != edge.token_ids[:length]
        own_spans = {span.start - start: span for span in self._spans_in(start, start + length)}
        edge_spans = {span.start: span for span in edge.spans if span.start < length}
        for at in own_spans.keys() | edge_spans.keys():
            if _are_equal(own_spans.get(at), edge_spans.get(at)):
                unequal[at : at + _length(own_spans[at])] = False
            else:
                unequal[at] = True
        different = np.flatnonzero(unequal)
        return int(different[0]) if len(different) else length

    def _spans_in(self, start: int, end: int) -> Iterator[MediaSpan]:
        return (span for span in self.spans if start <= span.start < end)


NOTHING = PromptKey(np.zeros(0, dtype=np.int32))


def _are_equal(one: MediaSpan | None, other: MediaSpan | None) -> bool:
    if one is None or other is None:
        return False
    return one.mm_hash == other.mm_hash and _length(one) == _length(other)


def _length(span: MediaSpan) -> int:
    return span.end - span.start


def inputs_hash(inputs: Mapping[str, NDArray[Any]], salt: str) -> str:
    """A hash of the encoder's inputs and `salt`, which separates tenants: the key of features."""
    digest = hashlib.sha256(hashlib.sha256(salt.encode()).digest())
    for name, array in sorted(inputs.items()):
        digest.update(f"{name} {array.dtype} {array.shape}\0".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
