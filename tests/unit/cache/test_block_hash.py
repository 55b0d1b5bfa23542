"""Blocks of prompts that follow each other: looked up by digests, compared position by position."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cache.prompts import Item, is_boundary, num_common, parts_of, prompt_of
from vlm_server.cache.block_hash import BlockHashChain, BlockWalk, KVBlockIndex, block_after
from vlm_server.cache.prompt_key import PromptKey

SPANS: list[Item] = [("red", 2, 9), ("red", 3, 9), ("blue", 2, 9)]
words = st.lists(st.one_of(st.integers(0, 2), st.sampled_from(SPANS)), min_size=1, max_size=8)
salts = st.sampled_from(["", "mine"])


def everything(key: str) -> bool:
    return True


def keep(
    blocks: KVBlockIndex, prompt_key: PromptKey, salt: str = "", end: int | None = None
) -> BlockWalk:
    """Add what is missing of `prompt_key`, as a tier would; returns what was there."""
    walk = blocks.walk(prompt_key, len(prompt_key), salt, everything)
    end = len(prompt_key) if end is None else end
    if walk.length < end:
        blocks.add(block_after(walk.chain, prompt_key.part(walk.length, end)))
    return walk


@given(words, salts, st.data())
def test_digest_is_independent_of_how_prompt_is_split(
    prompt: list[Item], salt: str, data: st.DataObject
) -> None:
    prompt_key = prompt_of(prompt)
    parts = parts_of(prompt_key)
    cut = data.draw(st.sampled_from([n for n in range(len(parts)) if is_boundary(parts, n)]))
    whole, cut_up = BlockHashChain(salt), BlockHashChain(salt)
    whole.add(prompt_key)
    cut_up.add(prompt_key.part(0, cut))
    cut_up.add(prompt_key.part(cut, len(prompt_key)))
    assert whole.digest == cut_up.digest


@given(words, salts, words, salts)
def test_digests_are_equal_only_for_equal_prompt_and_salt(
    one: list[Item], salt: str, other: list[Item], other_salt: str
) -> None:
    chains = BlockHashChain(salt), BlockHashChain(other_salt)
    for chain, prompt in zip(chains, (one, other), strict=True):
        chain.add(prompt_of(prompt))
    assert (chains[0].digest == chains[1].digest) == ((one, salt) == (other, other_salt))


@given(st.lists(st.tuples(words, salts), max_size=6), words, salts, st.integers(0, 20))
def test_walk_has_longest_common_prefix_with_stored_prompts(
    stored: list[tuple[list[Item], str]], prompt: list[Item], salt: str, limit: int
) -> None:
    blocks = KVBlockIndex(whole_blocks=False)
    for words_, salt_ in stored:
        keep(blocks, prompt_of(words_), salt_)
    prompt_key = prompt_of(prompt)
    walk = blocks.walk(prompt_key, limit, salt, everything)
    limit = min(limit, len(prompt_key))
    alike = [parts_of(prompt_of(words_)) for words_, salt_ in stored if salt_ == salt]
    assert walk.length == max(
        [0, *(num_common(parts, parts_of(prompt_key), limit) for parts in alike)]
    )
    assert walk.length == sum(count for _, count in walk.blocks)
    matched = tuple(p for block, n in walk.blocks for p in parts_of(block.part.part(0, n)))
    assert matched == parts_of(prompt_key)[: walk.length]


def test_whole_blocks_match_completely_or_not_at_all() -> None:
    blocks = KVBlockIndex(whole_blocks=True)
    keep(blocks, prompt_of([1, 2, 3]), end=2)
    keep(blocks, prompt_of([1, 2, 3]))
    lengths = [
        blocks.walk(prompt_of(prompt), limit, "", everything).length
        for prompt, limit in [([1, 2, 3, 4], 9), ([1, 2, 3], 2), ([1, 2, 4], 9), ([1, 4], 9)]
    ]
    assert lengths == [3, 2, 2, 0]


def test_unusable_or_dropped_block_ends_walk() -> None:
    blocks, prompt_key = KVBlockIndex(whole_blocks=False), prompt_of([1, 2, 3])
    keep(blocks, prompt_key, end=1)
    keep(blocks, prompt_key, end=2)
    walk = keep(blocks, prompt_key)
    first, second = walk.keys
    assert blocks.walk(prompt_key, 9, "", lambda key: key != second).length == 1
    blocks.drop([first, "unknown"])
    assert blocks.walk(prompt_key, 9, "", everything).length == 0
    assert len(blocks) == 2
    blocks.drop(walk.keys)
    assert len(blocks) == 1
