"""Which stored blocks of prompts follow which. Knows elements and digests; knows no file.

A prompt's blocks form a chain: each names, by a digest, all elements before its own. The digest
finds blocks; their own elements are compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from vlm_server.cache.prompt_key import PromptKey


class BlockHashChain:
    """SHA-256 over elements from a prompt's first on, however they are cut into parts."""

    def __init__(self, salt: str = "") -> None:
        self._hash = hashlib.sha256(hashlib.sha256(salt.encode()).digest())

    @property
    def digest(self) -> str:
        """In hex."""
        return self._hash.hexdigest()

    def add(self, part: PromptKey) -> None:
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
class KVBlock:
    """`elements` that follow those whose digest is `parent`; `key` names them all."""

    parent: str
    key: str
    elements: PromptKey


@dataclass(frozen=True, slots=True)
class BlockWalk:
    """KVBlockIndex one behind the other, each with how many of its elements are meant.

    `length` is that of all, and `chain` is behind them.
    """

    blocks: tuple[tuple[KVBlock, int], ...]
    length: int
    chain: BlockHashChain

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(block.key for block, _ in self.blocks)


def block_after(chain: BlockHashChain, elements: PromptKey) -> KVBlock:
    """The block of `elements` behind `chain`, which moves on behind them."""
    parent = chain.digest
    chain.add(elements)
    both = hashlib.sha256((parent + chain.digest).encode()).hexdigest()
    return KVBlock(parent, f"prefix-{both}", elements)


class KVBlockIndex:
    """An index of blocks; those that are `whole` are of use as a whole or not at all."""

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole
        self._by_key: dict[str, KVBlock] = {}
        self._behind: dict[tuple[str, int | str], dict[str, KVBlock]] = {}
        """By their parent and their first element."""

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, block: KVBlock) -> None:
        self._by_key[block.key] = block
        self._behind.setdefault(_place(block), {})[block.key] = block

    def drop(self, keys: Iterable[str]) -> None:
        """Those that are not here are no error."""
        for key in keys:
            if block := self._by_key.pop(key, None):
                siblings = self._behind[_place(block)]
                del siblings[key]
                if not siblings:
                    del self._behind[_place(block)]

    def walk(
        self, elements: PromptKey, limit: int, salt: str, is_usable: Callable[[str], bool]
    ) -> BlockWalk:
        """The blocks of the first `limit` elements at most, of those whose key is usable.

        Of several that could come next the longest is taken.
        """
        chain, found, at = BlockHashChain(salt), list[tuple[KVBlock, int]](), 0
        limit = min(limit, len(elements))
        while at < limit:
            behind = self._behind.get((chain.digest, elements.key_at(at)), {})
            usable = [block for key, block in behind.items() if is_usable(key)]
            counts = [self._num_common(elements, at, limit, block.elements) for block in usable]
            count = max(counts, default=0)
            if not count:
                break
            found.append((usable[counts.index(count)], count))
            chain.add(elements.part(at, at + count))
            at += count
        return BlockWalk(tuple(found), at, chain)

    def _num_common(self, elements: PromptKey, at: int, limit: int, own: PromptKey) -> int:
        count = elements.num_common(at, own)
        count = elements.floor(min(at + count, limit)) - at
        return 0 if self._whole and count < len(own) else count


def _place(block: KVBlock) -> tuple[str, int | str]:
    return block.parent, block.elements.first
