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
from vlm_server.interfaces import Branches, MemoryReading, SchedulerOutput
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


def add_question(requests: LiveRequests, name: str, lengths: Sequence[int]) -> Request:
    """A request whose prompt is prefilled, and whose options are to be scored."""
    question = add(requests, name, lengths, images=1)
    question.move_to(State.PREFILL)
    question.is_known_to_runner = True
    question.num_prefilled = question.prompt.num_tokens
    return question


def planner_of(requests: LiveRequests, memory: FakeMemory) -> Planner:
    """With a mebibyte for each token of KV."""
    caches = Caches()
    governor = Governor(MemorySettings(), memory, FakeProcess(), caches)
    admission = Admission(governor, lambda num_tokens: num_tokens * MIB, 512)
    return Planner(config(max_num_seqs=8), requests, caches, admission, lambda *_: 0, lambda: 0.0)


@pytest.mark.parametrize(("limit", "beside"), [(10_000, 15), (600, 7), (430, 0)])
def test_options_fit_into_memory_beside_encode(limit: int, beside: int) -> None:
    """If not one does, they are scored after it; other requests don't wait for them."""
    requests, memory = LiveRequests(), FakeMemory(0, 0, limit * MIB, peak_bytes=0)
    planner = planner_of(requests, memory)
    add_question(requests, "question", [2] * 15)
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


class FillingMemory(FakeMemory):
    """Memory that an encode fills meanwhile: 30 MiB from each reading to the next."""

    def read(self) -> MemoryReading:
        self.active_bytes += 30 * MIB
        return super().read()


def test_encode_that_allocates_leaves_no_work_empty() -> None:
    """Whether options fit is asked once: what has the turn has something to do."""
    turns = list[str]()
    for limit in range(300, 900, 10):
        requests, memory = LiveRequests(), FillingMemory(0, 0, limit * MIB, peak_bytes=0)
        planner = planner_of(requests, memory)
        add_question(requests, "question", [2])
        add(requests, "picture", images=1, peak_bytes=400 * MIB)
        add(requests, "text")
        plan = planner.plan(is_draining=False)
        assert plan.encode
        for work in plan.prefills:
            assert work.num_tokens or work.branches
            turns.append(work.request_id)
    assert set(turns) == {"question", "text"}


def work_of(requests: LiveRequests, plan: SchedulerOutput) -> tuple[str, int]:
    """What `plan` prefills, as if it was done: the request, and the end of its tokens there."""
    (work,) = plan.prefills
    request = requests[work.request_id]
    request.num_prefilled = work.end
    request.scoring.record(work.branches)
    if work.is_last:
        request.start_decode()
    return work.request_id, work.branches[-1].width if work.branches else work.end


def test_parts_of_option_follow_each_other() -> None:
    """The copy of KV between them is reserved instead of another's chunk, options or encode."""
    requests = LiveRequests()
    planner = planner_of(requests, FakeMemory())
    running = add(requests, "running")
    running.is_known_to_runner = True
    running.start_decode()
    add_question(requests, "long", [100, 100])
    assert work_of(requests, planner.plan(is_draining=False)) == ("long", 32)
    add_question(requests, "short", [2])
    add(requests, "text")
    add(requests, "picture", images=1)
    plans, works = list[SchedulerOutput](), list[tuple[str, int]]()
    for _ in range(5):
        plans.append(planner.plan(is_draining=False))
        works.append(work_of(requests, plans[-1]))
    assert works[:3] == [("long", 64), ("long", 96), ("long", 100)]
    assert {name for name, _ in works[3:]} > {"long"}, "others have turns between options"
    assert [bool(plan.encode) for plan in plans[:4]] == [False, False, False, True]
    assert all(plan.decode for plan in plans)


def test_part_of_option_waits_for_no_memory() -> None:
    """That of the whole option was found before its first part."""
    requests, memory = LiveRequests(), FakeMemory(0, 0, 10_000 * MIB, peak_bytes=0)
    planner = planner_of(requests, memory)
    running = add(requests, "running")
    running.is_known_to_runner = True
    running.start_decode()
    add_question(requests, "question", [100])
    add(requests, "picture", images=1)
    add(requests, "text")
    plan = planner.plan(is_draining=False)
    assert plan.encode
    assert work_of(requests, plan) == ("question", 32)
    memory.active_bytes = memory.limit_bytes
    assert work_of(requests, planner.plan(is_draining=False)) == ("question", 64)


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
        add_question(requests, name, [2] * num_options)
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
