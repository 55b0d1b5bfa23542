"""Which stored pieces of prompts follow which. Knows elements and digests; knows no file.

A prompt's pieces form a chain: each names, by a digest, all elements before its own. The digest
finds pieces; their own elements are compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from vlm_server.cache.elements import Elements


class Chain:
    """SHA-256 over elements from a prompt's first on, however they are cut into parts."""

    def __init__(self, salt: str = "") -> None:
        self._hash = hashlib.sha256(hashlib.sha256(salt.encode()).digest())

    @property
    def digest(self) -> str:
        """In hex."""
        return self._hash.hexdigest()

    def add(self, part: Elements) -> None:
        """Go on behind `part`."""
        cursor = 0
        for span in part.spans:
            self._add_ids(part.token_ids[cursor : span.start])
            self._add_ids(np.array([-1, span.end - span.start]))  # no token's id is negative
            self._hash.update(hashlib.sha256(span.key.encode()).digest())
            cursor = span.start
        self._add_ids(part.token_ids[cursor:])

    def _add_ids(self, ids: np.ndarray) -> None:
        self._hash.update(ids.astype("<i4").tobytes())


@dataclass(frozen=True, slots=True)
class Piece:
    """`elements` that follow those whose digest is `parent`; `key` names them all."""

    parent: str
    key: str
    elements: Elements


@dataclass(frozen=True, slots=True)
class Walk:
    """Pieces one behind the other, each with how many of its elements are meant.

    `length` is that of all, and `chain` is behind them.
    """

    pieces: tuple[tuple[Piece, int], ...]
    length: int
    chain: Chain

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(piece.key for piece, _ in self.pieces)


def piece_behind(chain: Chain, elements: Elements) -> Piece:
    """The piece of `elements` behind `chain`, which moves on behind them."""
    parent = chain.digest
    chain.add(elements)
    both = hashlib.sha256((parent + chain.digest).encode()).hexdigest()
    return Piece(parent, f"prefix-{both}", elements)


class Pieces:
    """An index of pieces; those that are `whole` are of use as a whole or not at all."""

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole
        self._by_key: dict[str, Piece] = {}
        self._behind: dict[tuple[str, int | str], dict[str, Piece]] = {}
        """By their parent and their first element."""

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, piece: Piece) -> None:
        self._by_key[piece.key] = piece
        self._behind.setdefault(_place(piece), {})[piece.key] = piece

    def drop(self, keys: Iterable[str]) -> None:
        """Those that are not here are no error."""
        for key in keys:
            if piece := self._by_key.pop(key, None):
                siblings = self._behind[_place(piece)]
                del siblings[key]
                if not siblings:
                    del self._behind[_place(piece)]

    def walk(
        self, elements: Elements, limit: int, salt: str, is_usable: Callable[[str], bool]
    ) -> Walk:
        """The pieces of the first `limit` elements at most, of those whose key is usable.

        Of several that could come next the longest is taken.
        """
        chain, found, at = Chain(salt), list[tuple[Piece, int]](), 0
        limit = min(limit, len(elements))
        while at < limit:
            behind = self._behind.get((chain.digest, elements.key_at(at)), {})
            usable = [piece for key, piece in behind.items() if is_usable(key)]
            counts = [self._num_common(elements, at, limit, piece.elements) for piece in usable]
            count = max(counts, default=0)
            if not count:
                break
            found.append((usable[counts.index(count)], count))
            chain.add(elements.part(at, at + count))
            at += count
        return Walk(tuple(found), at, chain)

    def _num_common(self, elements: Elements, at: int, limit: int, own: Elements) -> int:
        count = elements.num_common(at, own)
        count = elements.floor(min(at + count, limit)) - at
        return 0 if self._whole and count < len(own) else count


def _place(piece: Piece) -> tuple[str, int | str]:
    return piece.parent, piece.elements.first
