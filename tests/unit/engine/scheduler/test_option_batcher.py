"""Options that share a call: as many as fit, with little padding, and none left out."""

from __future__ import annotations

import random

from vlm_server.engine.scheduler.option_batcher import branches_of
from vlm_server.interfaces import Branches


def test_short_options_share_call() -> None:
    assert branches_of([1, 1, 2, 2, 3], 0, 256, 5) == (Branches(0, 5, 3),)


def test_long_option_gets_call_of_its_own() -> None:
    lengths = [1] * 30 + [40]
    assert branches_of(lengths, 0, 256, 31) == (Branches(0, 30, 1), Branches(30, 31, 40))


def test_step_is_bounded_by_tokens_and_options() -> None:
    assert branches_of([2] * 100, 10, 50, 100) == (Branches(10, 35, 2),)
    assert branches_of([2] * 100, 10, 50, 1) == (Branches(10, 11, 2),)
    assert branches_of([200, 200], 0, 50, 2) == (Branches(0, 1, 200),)


def test_each_option_is_scored_once_with_bounded_padding() -> None:
    draw = random.Random(4)
    for _ in range(200):
        lengths = sorted(draw.choice((1, 2, 3, 9, 50)) for _ in range(draw.randint(1, 90)))
        first, scored = 0, list[int]()
        while first < len(lengths):
            step = branches_of(lengths, first, 256, len(lengths))
            assert sum(each.num_tokens for each in step) <= 256
            for each in step:
                needed = lengths[each.first : each.end]
                assert max(needed) == each.width
                assert each.num_tokens <= max(32, 1.5 * sum(needed))
                scored += range(each.first, each.end)
            first = step[-1].end
        assert scored == list(range(len(lengths)))
