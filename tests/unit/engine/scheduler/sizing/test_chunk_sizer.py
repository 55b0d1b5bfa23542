"""Chunks fit a step's time, whatever the device's costs are, and have few sizes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from vlm_server.engine.scheduler.sizing.chunk_sizer import ChunkSizer
from vlm_server.interfaces import PreparedPrompt

Device = Callable[[int], float]


def sizes(device: Device, count: int = 12, budget: float = 0.05, largest: int = 2048) -> list[int]:
    """The chunks of a prompt without end on a device that takes `device(tokens)` seconds."""
    sizer = ChunkSizer(budget, largest)
    chunk_sizes = []
    for _ in range(count):
        chunk_sizes.append(sizer.chunk_tokens(10**6, others_decode=True))
        sizer.record(chunk_sizes[-1], device(chunk_sizes[-1]))
    return chunk_sizes


def test_chunk_size_grows_to_step_limit():
    assert sizes(lambda tokens: 0.012 + tokens * 1e-5)[-1] == 2048
    assert sizes(lambda tokens: 0.012 + tokens * 3e-5)[-1] == 1024


def test_chunk_size_shrinks_to_step_limit():
    assert sizes(lambda tokens: tokens * 1e-3)[-1] == 32
    assert sizes(lambda tokens: tokens * 1e-1)[-1] == 16


def test_chunk_size_stays_where_shrinking_saves_no_time():
    """Beside an encode a chunk may take as long as the encode, however small it is."""
    assert min(sizes(lambda tokens: 0.08 + tokens * 1e-5)) >= 64


def test_single_slow_chunk_does_not_shrink_size():
    """The first chunk of a size may wait for the compilation of a kernel."""
    known_sizes: set[int] = set()

    def compiles(tokens: int) -> float:
        slow = 0.5 if tokens not in known_sizes else 0.0
        known_sizes.add(tokens)
        return slow + 0.012 + tokens * 1e-5

    assert sizes(compiles, 20)[-1] == 2048


def test_chunk_size_that_was_slow_is_tried_again_later():
    """Otherwise one busy moment would keep chunks small forever."""
    sizer = ChunkSizer(0.05, 2048)
    for _ in range(5):
        sizer.record(32, 9.0)
    for _ in range(30):
        size = sizer.chunk_tokens(10**6, others_decode=True)
        sizer.record(size, 0.025 + size * 1e-5)
    assert size == 2048


def test_chunk_size_follows_slower_device():
    sizer = ChunkSizer(0.05, 2048)
    for _ in range(8):
        sizer.record(1024, 0.02)
    for _ in range(12):
        size = sizer.chunk_tokens(10**6, others_decode=True)
        sizer.record(size, size * 1.5e-4)
    assert sizer.chunk_tokens(10**6, others_decode=True) == 256


def test_chunk_sizes_are_powers_of_two():
    assert all(size & (size - 1) == 0 for size in sizes(lambda tokens: tokens * 1.3e-4))


@pytest.mark.parametrize("largest", [1, 3, 16, 100])
def test_chunk_size_never_exceeds_maximum(largest: int):
    assert set(sizes(lambda _: 1e-6, largest=largest)) <= set(range(1, largest + 1))


def test_chunk_includes_small_rest_of_prompt():
    sizer = ChunkSizer(0.05, 2048)
    for _ in range(5):
        sizer.record(1024, 0.04)
    assert sizer.chunk_tokens(1200, others_decode=True) == 1200
    assert sizer.chunk_tokens(1400, others_decode=True) == 1024
    assert sizer.chunk_tokens(5, others_decode=True) == 5


def test_chunk_may_take_one_second_while_no_sequence_decodes():
    """A request that arrives meanwhile waits for the chunk."""
    sizer = ChunkSizer(0.05, 2048)
    assert sizer.chunk_tokens(10**6, others_decode=False) == 128, "nothing is measured"
    for _ in range(8):
        size = sizer.chunk_tokens(10**6, others_decode=False)
        sizer.record(size, size * 1.5e-3)
    assert size == 512
    for _ in range(40):
        size = sizer.chunk_tokens(10**6, others_decode=False)
        sizer.record(size, size * 1e-4)
    assert size == 2048


@pytest.mark.parametrize("others_decode", [True, False])
def test_chunks_shrink_with_cached_length_before_them(others_decode: bool):
    """Even the first chunk, if it follows a long cached prefix."""
    sizer = ChunkSizer(1.0, 2048)

    def chunk_sizes(num_before: int, count: int) -> list[int]:
        sizes = []
        for _ in range(count):
            sizes.append(sizer.chunk_tokens(10**6, num_before, others_decode=others_decode))
            sizer.record(sizes[-1], sizes[-1] * 6e-4 * (1 + num_before / 30_000), num_before)
        return sizes

    assert chunk_sizes(0, 10)[-1] == 1024
    late = chunk_sizes(100_000, 10)
    assert late[0] <= 512
    assert late[-1] == 256
    assert chunk_sizes(0, 10)[-1] == 1024


def test_chunk_sizer_learns_from_prompts_in_single_chunk():
    """Whole prompts are chunks of other sizes than the sizer chooses; it learns from them, too."""
    sizer = ChunkSizer(0.1, 2048)
    for tokens in (33, 65, 1, 1):
        sizer.record(tokens, tokens * 1e-3)
    chunk_sizes = []
    for _ in range(10):
        left = 319
        while left:
            chunk_sizes.append(sizer.chunk_tokens(left, others_decode=True))
            sizer.record(chunk_sizes[-1], chunk_sizes[-1] * 1e-3)
            left -= chunk_sizes[-1]
    assert max(chunk_sizes[-10:]) <= 64 * 1.25


def test_chunk_sizer_ignores_oversized_atomic_chunks():
    sizer = ChunkSizer(0.05, 2048)
    sizer.record(128, 0.045)
    for _ in range(16):
        sizer.record(6000, 2.0)
    assert sizer.chunk_tokens(10**6, others_decode=True) == 128


@pytest.mark.parametrize(
    ("chunk_ends", "end"),
    [
        ((), 1000),
        ((900, 964), 1000),
        ((900, 965), 900),
        ((936,), 1000),
        ((935,), 935),
        ((100, 950), 100),
        ((900, 950, 990), 990),
        ((100, 150, 200, 900), 200),
    ],
)
def test_chunk_continues_for_few_tokens_after_few_points(chunk_ends: tuple[int, ...], end: int):
    prompt = PreparedPrompt(
        np.arange(1000, dtype=np.int32), snapshot_points=(5, *chunk_ends), chunk_ends=chunk_ends
    )
    sizer = ChunkSizer(0.05, 2048, max_inner_points=2)
    assert sizer.chunk_end(prompt, 0, piggyback_tokens=2000, others_decode=False) == end
