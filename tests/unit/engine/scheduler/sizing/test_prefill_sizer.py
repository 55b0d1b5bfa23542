"""The size of prefill batches grows as long as the first prompt is not delayed, on any device."""

from __future__ import annotations

from collections.abc import Callable

from vlm_server.engine.scheduler.sizing.prefill_sizer import PrefillSizer

Device = Callable[[int, int], float]
"""Seconds of a chunk, by the tokens of the longest prompt and their number."""
SHORT, LONG = 100, 1000


def gpu(num_tokens: int, count: int) -> float:
    """Launching the kernels takes most of a short one."""
    return max(0.010 + 0.0001 * count, 0.000013 * num_tokens * count)


def cpu(num_tokens: int, count: int) -> float:
    return 0.0005 * num_tokens * count


def counts(
    device: Device,
    num_tokens: int = SHORT,
    times: int = 10,
    waiting: int = 8,
    max_seconds: float = 0.25,
) -> list[int]:
    """The sizes of prefill batches while so many prompts always wait."""
    sizer, batch_sizes = PrefillSizer(), list[int]()
    for _ in range(times):
        longest = [num_tokens] * waiting
        batch_sizes.append(sizer.choose_num_prompts(longest, max_seconds, others_decode=False))
        sizer.record(
            num_tokens, batch_sizes[-1], device(num_tokens, batch_sizes[-1]), others_decode=False
        )
    return batch_sizes


def test_prefill_batch_doubles_while_first_is_not_delayed():
    assert counts(gpu) == [1, 1, 2, 2, 4, 4, 8, 8, 8, 8]


def test_long_prompts_are_not_batched_where_time_is_linear():
    assert counts(gpu, LONG) == [1, 1, 2, 2, 1, 1, 1, 1, 1, 1]


def test_useless_prefill_batch_is_tried_twice_and_again_later():
    batch_sizes = counts(cpu, times=1500)
    assert batch_sizes[:6] == [1, 1, 2, 2, 1, 1]
    assert max(batch_sizes) == 2
    assert 2 < batch_sizes.count(2) < 10


def test_prefill_batch_is_not_tried_beyond_max_seconds():
    assert counts(cpu, LONG) == [1] * 10
    assert counts(gpu, max_seconds=0.015) == [1] * 10


def test_prefill_batch_never_exceeds_waiting_prompts():
    assert max(counts(gpu, waiting=3)) == 2


def test_slow_first_prefill_does_not_shrink_batch():
    known_counts = set[int]()

    def planning(num_tokens: int, count: int) -> float:
        first = count not in known_counts
        known_counts.add(count)
        return gpu(num_tokens, count) + 0.06 * first

    assert counts(planning, max_seconds=10)[-1] == 8


def test_batch_with_short_prompt_is_judged_by_its_time():
    """And is no trial: the short one might wait long."""
    sizer = PrefillSizer()
    for _ in range(2):
        sizer.record(SHORT, 1, 0.010, others_decode=False)
        sizer.record(LONG, 1, 0.015, others_decode=False)
    assert sizer.choose_num_prompts([SHORT, LONG], 0.25, others_decode=False) == 1
    assert sizer.choose_num_prompts([LONG, LONG], 0.25, others_decode=False) == 2
    for _ in range(2):
        sizer.record(LONG, 2, 0.016, others_decode=False)
    assert sizer.choose_num_prompts([LONG, LONG], 0.25, others_decode=False) == 2
    assert sizer.choose_num_prompts([SHORT, LONG], 0.25, others_decode=False) == 1


def test_longer_prompts_are_not_tried_after_useless_shorter_ones():
    sizer = PrefillSizer()
    for _ in range(2):
        sizer.record(SHORT, 1, 0.010, others_decode=False)
        sizer.record(LONG, 1, 0.100, others_decode=False)
    assert sizer.choose_num_prompts([LONG, LONG], 0.25, others_decode=False) == 2
    for _ in range(2):
        sizer.record(SHORT, 2, 0.020, others_decode=False)
    assert sizer.choose_num_prompts([LONG, LONG], 0.25, others_decode=False) == 1


def test_prefill_times_during_decode_are_compared_separately():
    sizer = PrefillSizer()
    for _ in range(2):
        sizer.record(SHORT, 1, 0.010, others_decode=False)
    assert sizer.choose_num_prompts([SHORT, SHORT], 0.25, others_decode=True) == 1
    for _ in range(2):
        sizer.record(SHORT, 1, 0.017, others_decode=True)
        sizer.record(SHORT, 2, 0.018, others_decode=True)
    assert sizer.choose_num_prompts([SHORT, SHORT], 0.25, others_decode=True) == 2
