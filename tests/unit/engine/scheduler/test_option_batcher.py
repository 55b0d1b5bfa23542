"""Options that share a call: as many as fit, with little padding, and none left out."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.unit.engine.fakes import (
    ByteDecoder,
    FakeMemory,
    FakeProcess,
    config,
    prepared,
    prompt,
    submit,
)
from vlm_server.cache.caches import Caches
from vlm_server.engine.memory.admission import Admission
from vlm_server.engine.memory.governor import Governor
from vlm_server.engine.request.option_progress import OptionProgress
from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State
from vlm_server.engine.scheduler.device_order import DeviceOrder
from vlm_server.engine.scheduler.live_requests import LiveRequests
from vlm_server.engine.scheduler.option_batcher import OptionBatcher, branches_of
from vlm_server.engine.scheduler.planner import Planner
from vlm_server.interfaces import Branches
from vlm_server.protocol import SamplingParams
from vlm_server.settings import MIB, MemorySettings


def progress(lengths: Sequence[int]) -> OptionProgress:
    return OptionProgress([(0,) * length for length in lengths])


def test_short_options_share_call() -> None:
    assert branches_of(progress([1, 1, 2, 2, 3]), 256, 5) == (Branches(0, 5, 3),)


def test_long_option_gets_call_of_its_own() -> None:
    lengths = [1] * 30 + [40]
    assert branches_of(progress(lengths), 256, 31) == (Branches(0, 30, 1), Branches(30, 31, 40))


def test_step_is_bounded_by_tokens_and_options() -> None:
    begun = progress([2] * 100)
    begun.record([Branches(0, 10, 2)])
    assert branches_of(begun, 50, 100) == (Branches(10, 35, 2),)
    assert branches_of(begun, 50, 1) == (Branches(10, 11, 2),)


def test_long_option_is_scored_in_parts() -> None:
    long = progress([3, 120, 120])
    steps = []
    while not long.ends_with(()):
        steps.append(branches_of(long, 50, 3))
        long.record(steps[-1])
    second = (Branches(1, 2, 50), Branches(1, 2, 100, 50), Branches(1, 2, 120, 100))
    third = (Branches(2, 3, 50), Branches(2, 3, 100, 50), Branches(2, 3, 120, 100))
    assert steps == [(Branches(0, 1, 3),), *((part,) for part in (*second, *third))]


def test_options_are_scored_once_with_bounded_padding() -> None:
    draw = random.Random(4)
    for _ in range(200):
        lengths = sorted(draw.choice((1, 2, 3, 9, 50)) for _ in range(draw.randint(1, 90)))
        options, scored, max_tokens = progress(lengths), Counter[int](), draw.choice((20, 256))
        while not options.ends_with(()):
            step = branches_of(options, max_tokens, len(lengths))
            assert sum(each.num_tokens for each in step) <= max_tokens
            for each in step:
                needed = [min(n, each.width) - each.start for n in lengths[each.first : each.end]]
                assert max(needed) == each.width - each.start
                assert each.num_tokens <= max(32, 1.5 * sum(needed))
                scored.update(dict(zip(range(each.first, each.end), needed, strict=True)))
            options.record(step)
            assert options.num_tokens_left == sum(lengths) - scored.total()
        assert [scored[index] for index in range(len(lengths))] == lengths


def test_step_has_as_many_options_as_memory_allows() -> None:
    """One at least, for which memory is reserved."""
    for limit, expected in ((10_000, 40), (150, 5), (1, 1)):
        memory = FakeMemory(0, 0, limit * MIB, peak_bytes=0)
        governor = Governor(MemorySettings(), memory, FakeProcess(), Caches())
        admission = Admission(governor, lambda num_tokens: num_tokens * MIB, 512)
        batcher = OptionBatcher(config(), LiveRequests(), admission)
        request = Request(submit("a"), SamplingParams(), ByteDecoder(), clock=lambda: 0.0)
        request.move_to(State.PREPARING)
        question = prompt("twenty-four letters: abc")
        options = tuple((i,) for i in range(40))
        request.on_prepared(prepared(replace(question, options=options)), 0)
        (branches,) = batcher.next_branches(request, others_decode=False, encode_bytes=0)
        assert (question.num_tokens, branches) == (24, Branches(0, expected, 1))
        request.scoring.record([Branches(0, 39, 1)])
        last = batcher.next_branches(request, others_decode=True, encode_bytes=0)
        assert last == (Branches(39, 40, 1),)


def add(
    requests: LiveRequests,
    name: str,
    lengths: Sequence[int] = (),
    *,
    images: int = 0,
    peak_bytes: int = 0,
) -> Request:
    """A request with options of these `lengths`."""
    request = Request(submit(name), SamplingParams(), ByteDecoder(), clock=lambda: 0.0)
    request.move_to(State.PREPARING)
    options = tuple((i,) * length for i, length in enumerate(lengths))
    request.on_prepared(prepared(replace(prompt(name, images), options=options)), 0)
    request.admit(peak_bytes)
    requests.enqueue(request)
    return request


def add_question(requests: LiveRequests, name: str, num_options: int) -> Request:
    """A request whose prompt is prefilled, and whose options are to be scored."""
    question = add(requests, name, [2] * num_options, images=1)
    question.move_to(State.PREFILL)
    question.is_known_to_runner = True
    question.num_prefilled = question.prompt.num_tokens
    return question


@pytest.mark.parametrize(("limit", "beside"), [(10_000, 15), (600, 7), (430, 0)])
def test_options_fit_into_memory_beside_encode(limit: int, beside: int) -> None:
    """If not one does, they are scored after it; other requests don't wait for them.

    With a mebibyte for each token of KV.
    """
    requests = LiveRequests()
    caches, memory = Caches(), FakeMemory(0, 0, limit * MIB, peak_bytes=0)
    governor = Governor(MemorySettings(), memory, FakeProcess(), caches)
    admission = Admission(governor, lambda num_tokens: num_tokens * MIB, 512)
    planner = Planner(config(), requests, caches, admission, lambda *_: 0, lambda: 0.0)
    add_question(requests, "question", num_options=15)
    add(requests, "picture", images=1, peak_bytes=400 * MIB)
    add(requests, "text")
    plan = planner.plan(is_draining=False)
    (work,) = plan.prefills
    assert [encode.request_id for encode in plan.encode] == ["picture"]
    assert work.request_id == ("question" if beside else "text")
    assert sum(each.end - each.first for each in work.branches) == beside
    memory.limit_bytes = 10_000 * MIB
    planner.on_encoded(plan.encode, 1.0)
    plans = [planner.plan(is_draining=False) for _ in range(2)]
    assert (Branches(0, 15, 2),) in [plan.prefills[0].branches for plan in plans]


def test_padding_leaves_no_option_for_another_step() -> None:
    requests = LiveRequests()
    governor = Governor(MemorySettings(), FakeMemory(), FakeProcess(), Caches())
    batcher = OptionBatcher(config(), requests, Admission(governor, lambda _: 0, 512))
    question = add(requests, "question", (3, 3, 3, 3, 3, 5))
    branches = batcher.next_branches(question, others_decode=False, encode_bytes=0)
    assert branches == (Branches(0, 6, 5),)


def test_short_prompts_take_turns_with_many_options() -> None:
    """However many questions with more options than a prompt has tokens are under way."""
    requests = LiveRequests()
    order = DeviceOrder(requests, max_num_seqs=8)
    for name, num_options in (("first", 400), ("second", 300)):
        add_question(requests, name, num_options)
    picture = add(requests, "picture", images=1)
    assert order.next_to_encode(during=None) is picture
    picture.move_to(State.PREFILL)
    turns = list[str]()
    for _ in range(4):
        turn = order.next_to_prefill()
        assert turn is not None
        order.start_chunk(turn)
        if turn is not picture:
            first = turn.scoring.num_scored
            turn.scoring.record([Branches(first, first + 1, 2)])
        turns.append(turn.request_id)
    assert turns == ["first", "picture"] * 2
