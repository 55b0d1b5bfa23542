"""Blocks of prompts, indexed by the hash of the prompt before them, as in vLLM.

The positions of the block itself are then compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from vlm_server.cache.prompt_key import PromptKey


class BlockHashChain:
    """The SHA-256 of a prompt from its first position on, however it is divided into parts."""

    def __init__(self, salt: str = "") -> None:
        self._hash = hashlib.sha256(hashlib.sha256(salt.encode()).digest())

    @property
    def digest(self) -> str:
        """The digest of all parts added so far, in hex."""
        return self._hash.hexdigest()

    def add(self, part: PromptKey) -> None:
        """Append `part`."""
        cursor = 0
        for span in part.spans:
            self._add_ids(part.token_ids[cursor : span.start])
            self._add_ids(np.array([-1, span.end - span.start]))  # no token's id is negative
            self._hash.update(hashlib.sha256(span.mm_hash.encode()).digest())
            cursor = span.start
        self._add_ids(part.token_ids[cursor:])

    def _add_ids(self, ids: np.ndarray) -> None:
        self._hash.update(ids.astype("<i4").tobytes())


@dataclass(frozen=True, slots=True)
class KVBlock:
    """A part of a prompt after the positions with the digest `parent`; `key` names both."""

    parent: str
    key: str
    part: PromptKey


@dataclass(frozen=True, slots=True)
class BlockWalk:
    """Consecutive blocks that match a prompt."""

    blocks: tuple[tuple[KVBlock, int], ...]
    """Blocks in order, each with the number of its first positions that match."""
    length: int
    """The number of all matching positions."""
    chain: BlockHashChain
    """The hash of all matching positions."""

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(block.key for block, _ in self.blocks)


def block_after(chain: BlockHashChain, part: PromptKey) -> KVBlock:
    """The block of `part` after `chain`; appends `part` to `chain`."""
    parent = chain.digest
    chain.add(part)
    digest = hashlib.sha256((parent + chain.digest).encode()).hexdigest()
    return KVBlock(parent, f"prefix-{digest}", part)


class KVBlockIndex:
    """An index of blocks. With `whole_blocks`, a block matches as a whole or not at all."""

    def __init__(self, *, whole_blocks: bool) -> None:
        self._whole_blocks = whole_blocks
        self._by_key: dict[str, KVBlock] = {}
        self._children: dict[tuple[str, int | str], dict[str, KVBlock]] = {}
        """Blocks by key, by parent and first position."""

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, block: KVBlock) -> None:
        self._by_key[block.key] = block
        self._children.setdefault(_edge(block), {})[block.key] = block

    def drop(self, keys: Iterable[str]) -> None:
        """Remove blocks; unknown keys are no error."""
        for key in keys:
            if block := self._by_key.pop(key, None):
                siblings = self._children[_edge(block)]
                del siblings[key]
                if not siblings:
                    del self._children[_edge(block)]

    def walk(
        self, prompt: PromptKey, limit: int, salt: str, is_usable: Callable[[str], bool]
    ) -> BlockWalk:
        """The blocks with usable keys that `prompt` begins with, up to `limit` positions.

        Picks the longest match where several blocks come next.
        """
        chain, matched, at = BlockHashChain(salt), list[tuple[KVBlock, int]](), 0
        limit = min(limit, len(prompt))
        while at < limit:
            children = self._children.get((chain.digest, prompt.key_at(at)), {})
            usable = [block for key, block in children.items() if is_usable(key)]
            counts = [self._num_common(prompt, at, limit, block.part) for block in usable]
            count = max(counts, default=0)
            if not count:
                break
            matched.append((usable[counts.index(count)], count))
            chain.add(prompt.part(at, at + count))
            at += count
        return BlockWalk(tuple(matched), at, chain)

    def _num_common(self, prompt: PromptKey, at: int, limit: int, part: PromptKey) -> int:
        count = prompt.num_common(at, part)
        count = prompt.floor(min(at + count, limit)) - at
        return 0 if self._whole_blocks and count < len(part) else count


def _edge(block: KVBlock) -> tuple[str, int | str]:
    return block.parent, block.part.first
