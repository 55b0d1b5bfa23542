"""A follower holds exactly the segments that rank 0 refers to, through stores, splits and drops."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
from mlx_vlm.models.cache import KVCache

from vlm_server.cache.caches import Caches
from vlm_server.cache.kv_storage import KVStorage
from vlm_server.cache.prompt_key import PromptKey
from vlm_server.runner.distributed.messages import SegmentRef, Stored
from vlm_server.runner.distributed.prefixes import (
    FollowerPrefixes,
    HeldPrefix,
    NumberedSegment,
    RankZeroPrefixes,
    SegmentLog,
)
from vlm_server.runner.kv.segments import KVSegment, SequenceState, restore

TOKEN_BYTES = 2 * 2 * 4 * 4
"""Keys and values of a token: two heads of four float32 each."""


class Pair:
    """Rank 0 and a follower with different heads; messages arrive at once."""

    def __init__(self, limit_tokens: int) -> None:
        self.caches = Caches(
            token_layout_bytes=0,
            pixel_bytes=0,
            encoder_bytes=0,
            tile_bytes=0,
            prefix_bytes=limit_tokens * TOKEN_BYTES,
            needs_snapshots=False,
        )
        self.sent: list[Stored] = []
        self.log = SegmentLog()
        self.rank_zero = RankZeroPrefixes(self.caches, self.sent.append, self.log)
        self.following = FollowerPrefixes(lambda: self.sent.pop(0))

    def store(self, token_ids: list[int]) -> None:
        key = PromptKey(np.array(token_ids, dtype=np.int32))
        self.rank_zero.store_prefix(key, state_of(token_ids, 0), "")
        self.following.store_prefix(key, state_of(token_ids, 1), "")
        assert not self.sent

    def match(self, token_ids: list[int]) -> tuple[int, HeldPrefix]:
        """Length of a prompt's prefix on rank 0, and the follower's state for that prefix."""
        key = PromptKey(np.array(token_ids, dtype=np.int32))
        found = self.caches.prefixes.match(key, len(token_ids))
        segments = tuple(SegmentRef(s.number, num_tokens) for s, num_tokens in found.segments)
        held, length = self.following.prefix(segments), found.length
        found.release()
        return length, held

    def num_stored(self) -> int:
        """The number of segments in rank 0's cache."""
        nodes, num_stored = [self.caches.prefixes._tree.root("")], 0
        while nodes:
            node = nodes.pop()
            num_stored += isinstance(node.segment, NumberedSegment)
            nodes += node.children.values()
        return num_stored

    def drop(self) -> None:
        self.following.drop(self.log.take_dropped())


def state_of(token_ids: list[int], rank: int) -> SequenceState:
    """A layer whose KV encodes its tokens and its rank."""
    layer = KVCache()
    values = mx.array(token_ids, dtype=mx.float32)[None, None, :, None] + 1000 * rank
    values = mx.broadcast_to(values, (1, 2, len(token_ids), 4))
    layer.update_and_fetch(values, values)
    return SequenceState([layer], {})


def tokens_of(held: HeldPrefix) -> list[int]:
    parts = [np.array(segment.arrays[0][0, 0, :count, 0]) for segment, count in held.segments]
    return [int(value) - 1000 for part in parts for value in part]


def test_extended_and_diverging_prompts_are_held_by_follower():
    pair = Pair(1000)
    for prompt in ([1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 9, 9]):
        pair.store(prompt)
        length, held = pair.match(prompt)
        assert length == held.length == len(prompt)
        assert tokens_of(held) == prompt


def test_follower_holds_quantized_kv_of_its_own_heads():
    pair, prompt = Pair(1000), [1, 2, 3, 4, 5]
    key, storage = PromptKey(np.array(prompt, dtype=np.int32)), KVStorage(8)
    for store, rank in ((pair.rank_zero, 0), (pair.following, 1)):
        store.store_prefix(key, state_of(prompt, rank).stored_as(storage), "")
    length, held = pair.match(prompt[:4])
    (segment, count) = held.segments[0]
    assert length == count == 4
    assert [array.dtype for array in segment.arrays] == 2 * [mx.int8, mx.float32]
    layers = [KVCache()]
    restore(layers, held, 8)
    assert layers[0].keys[0, 1, :4, 0].tolist() == [1001.0, 1002.0, 1003.0, 1004.0]


def test_unreferenced_segments_are_dropped_by_follower():
    pair = Pair(1000)
    pair.store([1, 2, 3, 4])
    pair.store([1, 2, 7, 8])
    pair.drop()
    assert len(pair.following) == 3
    pair.caches.drop()
    pair.drop()
    assert len(pair.following) == 0


def test_matched_segments_stay_on_follower_until_release():
    pair = Pair(1000)
    pair.store([1, 2, 3, 4])
    match = pair.caches.prefixes.match(PromptKey(np.array([1, 2, 3, 4], np.int32)), 4)
    pair.caches.drop()
    pair.drop()
    assert len(pair.following) == 1
    match.release()
    pair.caches.drop()
    pair.drop()
    assert len(pair.following) == 0


def test_follower_matches_rank_0_under_evictions():
    pair, draw = Pair(60), random.Random(1)
    for _ in range(400):
        prompt = [draw.randrange(3) for _ in range(draw.randrange(1, 25))]
        pair.store(prompt)
        pair.drop()
        asked = [draw.randrange(3) for _ in range(20)]
        length, held = pair.match(asked)
        assert tokens_of(held) == asked[:length]
    assert len(pair.following) == pair.num_stored()
    assert pair.caches.prefixes.stats().evictions > 50


def test_partial_store_failure_is_reported_to_follower():
    class Failing(SequenceState):
        def take(self, start: int, end: int) -> KVSegment:
            raise MemoryError

    pair = Pair(1000)
    pair.store([1, 2, 3, 4])
    key = PromptKey(np.array([1, 2, 8], np.int32))
    layer = KVCache()
    layer.update_and_fetch(*(mx.zeros((1, 2, 3, 4)) for _ in range(2)))
    try:
        pair.rank_zero.store_prefix(key, Failing([layer], {}), "")
    except MemoryError:
        pair.following.store_prefix(key, state_of([1, 2, 8], 1), "")
    pair.drop()
    length, held = pair.match([1, 2, 3, 4])
    assert length == 4
    assert tokens_of(held) == [1, 2, 3, 4]
    assert len(pair.following) == 2
