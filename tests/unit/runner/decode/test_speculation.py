"""How many drafts are worth verifying."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vlm_server.interfaces import DraftCounts
from vlm_server.runner.decode import speculation
from vlm_server.runner.decode.drafts import Drafter
from vlm_server.runner.decode.speculation import (
    Speculation,
    StepTimes,
    best_width,
    expected_tokens,
)

WIDTHS = (2, 3, 4, 6, 8, 12, 16)


def measured(slope: float, rows: int = 1) -> StepTimes:
    """Each further token of a row takes `slope` steps."""
    times = StepTimes()
    for _ in range(50):
        times.record(rows, 1, 0.01)
        times.record(rows, 8, 0.01 * (1 + 7 * slope))
    return times


def test_expected_tokens_sum_cumulative_probabilities():
    assert expected_tokens([]) == 1.0
    assert expected_tokens([0.5, 0.5]) == 1.75
    assert expected_tokens([1.0] * 7) == 8.0


def test_step_times_learn_cost_of_widths():
    times = measured(0.3)
    assert times.cost(1, 1) == 1.0
    assert times.cost(1, 8) == pytest.approx(3.1, rel=0.05)
    assert times.cost(2, 8) == StepTimes().cost(2, 8)


def test_step_times_keep_separate_costs_per_width():
    """Kernels change at some widths."""
    times = StepTimes()
    for _ in range(50):
        times.record(1, 1, 0.01)
        times.record(1, 4, 0.011)
        times.record(1, 8, 0.03)
    assert times.cost(1, 4) == pytest.approx(1.1, rel=0.05)
    assert times.cost(1, 8) == pytest.approx(3.0, rel=0.05)
    assert best_width((2, 4, 8), [[0.95] * 7], times) == 4


def test_plain_times_are_replaced_by_as_many_new_ones():
    """One disturbed plain step after many wide ones does not make these look free."""
    times = measured(0.3)
    for _ in range(250):
        times.record(1, 8, 0.01 * (1 + 7 * 0.3))
    assert times.needs_plain(1)
    times.record(1, 1, 0.04)
    for _ in range(20):
        times.record(1, 8, 0.01 * (1 + 7 * 0.3))
    assert times.cost(1, 8) == pytest.approx(1 + 7 * 0.3)
    assert times.needs_plain(1)
    for _ in range(3):
        times.record(1, 1, 0.02)
    assert not times.needs_plain(1)
    for _ in range(20):
        times.record(1, 8, 0.01 * (1 + 7 * 0.3))
    assert times.cost(1, 8) == pytest.approx((1 + 7 * 0.3) / 2)


def test_single_outlier_step_time_is_forgotten():
    times = measured(0.1)
    times.record(1, 1, 1.0)
    assert times.cost(1, 8) == pytest.approx(1.7, rel=0.05)


def test_disturbed_wide_steps_are_tried_again():
    disturbed = StepTimes()
    disturbed.record(1, 1, 0.01)
    for _ in range(20):
        disturbed.record(1, 8, 5.0)
    rejected = 0
    while best_width(WIDTHS, [[0.9] * 15], disturbed) == 1:
        disturbed.reject(1, are_good=True)
        rejected += 1
    assert 500 <= rejected <= 20_000


class Drafting:
    """A sequence whose drafts have these chances."""

    def __init__(self, chance: float) -> None:
        self.drafter = SimpleNamespace(
            probability=chance,
            guess=lambda count: [7] * count,
            probabilities=lambda count: [chance] * count,
        )
        self.sampler = SimpleNamespace(matcher=None)
        self.newest_token_followed = False

    def num_useful_drafts(self, limit: int) -> int:
        return limit


def test_time_of_single_wide_steps_among_plain_steps_is_measured(monkeypatch: pytest.MonkeyPatch):
    """In prose they stand alone. Each begins where the plain step ends that ran ahead of it.

    On this device a wide step takes as long as plain steps: drafts have to stop.
    """
    now = 0.0
    monkeypatch.setattr(speculation.time, "perf_counter", lambda: now)
    model = Speculation(WIDTHS)
    seqs: list[Any] = [Drafting(0.8)]
    num_wide = 0
    for _ in range(50):
        for _ in range(3):
            model.record_step(1, 1)
            now += 0.01
        if not model.can_gain(seqs):
            continue
        now += 0.007
        choice = model.drafts(seqs, frozenset())
        assert choice is not None
        now += 0.01 * choice.width
        model.record_step(1, choice.width)
        num_wide += 1
    assert num_wide < 10


@pytest.mark.parametrize(
    ("slope", "chance", "width"),
    [(0.02, 1.0, 16), (0.02, 0.1, 1), (1.0, 1.0, 1), (0.1, 0.8, 6), (0.8, 0.9, 1)],
)
def test_best_draft_width_follows_hit_rates_and_step_times(slope: float, chance: float, width: int):
    found = best_width(WIDTHS, [[chance] * 15], measured(slope))
    assert found == width or (width > 1 and abs(found - width) <= 2)


def test_rows_without_drafts_count_towards_best_width():
    times = measured(0.3, rows=4)
    assert best_width(WIDTHS, [[0.95] * 15] * 4, times) > 1
    assert best_width(WIDTHS, [[0.95] * 15, [], [], []], times) == 1


def test_best_draft_width_is_bounded_by_longest_draft():
    times = measured(0.01)
    assert best_width(WIDTHS, [[1.0, 1.0]], times) == 3
    assert best_width(WIDTHS, [[]], times) == 1
    assert best_width((8,), [[1.0] * 3], times) == 8


# ---- a draft head ----------------------------------------------------------------------------


class Head:
    """A head whose drafts are right for `share` of the time, and take `seconds` each.

    Other work on the machine multiplies the time of each step by `disturbance`.
    """

    def __init__(self, share: float, seconds: float) -> None:
        self.share, self.seconds = share, seconds
        self.now = self.worked = 0.0
        self.num_drafted = self.num_accepted = 0
        self.random = random.Random(1)
        self.disturbance: Callable[[], float] = lambda: 1.0

    def draft(self, count: int) -> list[list[int]]:
        self.now += count * self.seconds
        self.num_drafted += count
        return [[9] * count]

    def num_right(self, count: int) -> int:
        num_right = next((n for n in range(count) if self.random.random() >= self.share), count)
        self.num_accepted += num_right
        return num_right


def run_steps(head: Head, model: Speculation, chance: float, count: int) -> tuple[int, int]:
    """The steps by text and by head; plain steps take 10 ms, each further token 1 ms."""
    by_text = by_head = 0
    seqs: list[Any] = [Drafting(chance)]
    for _ in range(count):
        start = head.now
        choice = model.drafts(seqs, frozenset(), head.draft) if model.can_gain(seqs) else None
        width = 1 if choice is None else choice.width
        seconds = head.now - start + 0.01 + 0.001 * (width - 1)
        head.now = start + seconds * head.disturbance()
        head.worked += seconds
        if choice is not None:
            by_head += choice.by_head
            by_text += not choice.by_head
            drafts, (is_trained,) = choice.token_ids[0], choice.are_trained
            counts = DraftCounts(len(drafts), head.num_right(len(drafts)), is_trained)
            model.record_drafts([counts])
        model.record_step(1, width, by_head=choice is not None and choice.by_head)
    return by_text, by_head


@pytest.fixture
def new_head(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], Head]:
    def new(share: float, seconds: float) -> Head:
        head = Head(share, seconds)
        monkeypatch.setattr(speculation.time, "perf_counter", lambda: head.now)
        return head

    return new


NewHead = Callable[[float, float], Head]


@pytest.mark.parametrize(
    ("share", "seconds", "is_used"),
    [(0.9, 0.001, True), (0.1, 0.001, False), (0.9, 0.02, False)],
    ids=["good", "often wrong", "slow"],
)
def test_head_drafts_where_that_pays(
    new_head: NewHead, share: float, seconds: float, is_used: bool
):
    head, model = new_head(share, seconds), Speculation((2, 4, 8), has_head=True)
    run_steps(head, model, 0.0, 60)
    _, by_head = run_steps(head, model, 0.0, 200)
    assert by_head > 190 if is_used else by_head < 10


@pytest.mark.parametrize("share", [0.5, 0.6, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("seconds", [0.0002, 0.002, 0.0035])
def test_gain_of_head_comes_near_gain_allowed_by_share(
    new_head: NewHead, share: float, seconds: float
):
    head, model = new_head(share, seconds), Speculation(WIDTHS, has_head=True)
    run_steps(head, model, 0.0, 200)
    head.worked, head.num_accepted, count = 0.0, 0, 3000
    run_steps(head, model, 0.0, count)
    gain = (count + head.num_accepted) / (head.worked / 0.01)
    assert gain > 0.9 * allowed_gain(share, seconds)


def allowed_gain(share: float, seconds: float) -> float:
    """The gain of `run_steps` at the best width."""
    costs = {width: 1 + (width - 1) * (0.1 + seconds / 0.01) for width in WIDTHS}
    return max(
        1.0,
        *(expected_tokens([share] * (width - 1)) / cost for width, cost in costs.items()),
    )


@pytest.mark.parametrize("share", [0.1, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("seconds", [0.0002, 0.002, 0.0035])
def test_gain_of_head_comes_early_on_busy_machine(new_head: NewHead, share: float, seconds: float):
    """Median over 300 tokens, where times vary by e**0.5, and one in ten is three to five times as
    long."""
    gains = []
    for seed in range(9):
        head, model = new_head(share, seconds), Speculation(WIDTHS, has_head=True)
        head.random, times = random.Random(seed), random.Random(seed + 1)
        head.disturbance = lambda times=times: (
            times.lognormvariate(0, 0.5) * (times.uniform(3, 5) if times.random() < 0.1 else 1)
        )
        count = 0
        while count + head.num_accepted < 300:
            run_steps(head, model, 0.0, 1)
            count += 1
        gains.append((count + head.num_accepted) / (head.worked / 0.01))
    assert median(gains) >= 0.85 * allowed_gain(share, seconds)


def test_text_drafts_where_they_are_as_good_as_head(new_head: NewHead):
    head, model = new_head(0.8, 0.003), Speculation((2, 4, 8), has_head=True)
    run_steps(head, model, 0.0, 60)
    assert run_steps(head, model, 0.95, 100)[0] > 90
    assert run_steps(head, model, 0.2, 100)[1] > 90


def test_head_that_was_wrong_is_tried_again(new_head: NewHead):
    """The text may have become easier."""
    head, model = new_head(0.0, 0.001), Speculation((2, 4, 8), has_head=True)
    run_steps(head, model, 0.0, 300)
    head.share = 0.9
    assert run_steps(head, model, 0.0, 600)[1] > 50


def test_head_without_widths_never_drafts(new_head: NewHead):
    head, model = new_head(1.0, 0.0), Speculation(has_head=True)
    assert run_steps(head, model, 0.0, 10) == (0, 0)
    assert head.num_drafted == 0


# ---- text that repeats little --------------------------------------------------------------

PAGES = Path(__file__).parents[4] / "docs" / "decisions"
ANSWER_TOKENS, PROMPT_TOKENS = 300, 200


def prose() -> Iterator[tuple[list[int], list[int]]]:
    """Prompts, and the answers that continue them: the words of our decisions."""
    text = " ".join(path.read_text(encoding="utf-8") for path in sorted(PAGES.glob("00*.md")))
    tokens = [zlib.crc32(word.encode()) % 50_000 for word in re.findall(r"\w+|[^\w\s]", text)]
    for start in range(0, 40 * ANSWER_TOKENS, ANSWER_TOKENS):
        answer = tokens[start + PROMPT_TOKENS : start + PROMPT_TOKENS + ANSWER_TOKENS]
        yield tokens[start : start + PROMPT_TOKENS], answer


@pytest.mark.parametrize("slope", [0.1, 0.3, 0.6, 1.0, 2.0])
def test_drafts_of_prose_cost_less_than_one_percent(slope: float):
    """Each further token of a wide step takes `slope` plain steps, which is learned on the way."""
    model, seconds, num_tokens = Speculation(WIDTHS), 0.0, 0
    for prompt, answer in prose():
        drafter = Drafter(np.array(prompt, dtype=np.int32))
        done = 0
        while done < len(answer):
            left = len(answer) - done
            seq: Any = SimpleNamespace(
                sampler=SimpleNamespace(matcher=None),
                newest_token_followed=True,
                drafter=drafter,
                num_useful_drafts=lambda most, left=left: min(most, left - 1),
            )
            choice = model.drafts([seq], frozenset()) if model.can_gain([seq]) else None
            drafts = [] if choice is None else choice.token_ids[0]
            rights = takewhile(
                lambda pair: pair[0] == pair[1], zip(drafts, answer[done:], strict=False)
            )
            new = answer[done : done + 1 + len(list(rights))]
            width = 1 if choice is None else choice.width
            seconds += (step := 1 + slope * (width - 1))
            model._times.record(1, width, step)
            for token_id in new:
                drafter.append(token_id)
            done += len(new)
        num_tokens += len(answer)
    assert num_tokens == 40 * ANSWER_TOKENS
    assert seconds < 1.01 * num_tokens
