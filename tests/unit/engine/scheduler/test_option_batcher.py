"""Options that share a call: as many as fit, with little padding, and none left out."""

from __future__ import annotations

import random
from dataclasses import replace

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
from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State
from vlm_server.engine.scheduler.device_order import DeviceOrder
from vlm_server.engine.scheduler.live_requests import LiveRequests
from vlm_server.engine.scheduler.option_batcher import OptionBatcher, branches_of
from vlm_server.interfaces import Branches
from vlm_server.protocol import SamplingParams
from vlm_server.settings import MIB, MemorySettings


def test_short_options_share_call() -> None:
    assert branches_of([1, 1, 2, 2, 3], 0, 256, 5) == (Branches(0, 5, 3),)


def test_long_option_gets_call_of_its_own() -> None:
    lengths = [1] * 30 + [40]
    assert branches_of(lengths, 0, 256, 31) == (Branches(0, 30, 1), Branches(30, 31, 40))


def test_step_is_bounded_by_tokens_and_options() -> None:
    assert branches_of([2] * 100, 10, 50, 100) == (Branches(10, 35, 2),)
    assert branches_of([2] * 100, 10, 50, 1) == (Branches(10, 11, 2),)
    assert branches_of([200, 200], 0, 50, 2) == (Branches(0, 1, 200),)


def test_options_are_scored_once_with_bounded_padding() -> None:
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
        (branches,) = batcher.next_branches(request, others_decode=False)
        assert (question.num_tokens, branches) == (24, Branches(0, expected, 1))
        request.num_scored = 39
        assert batcher.next_branches(request, others_decode=True) == (Branches(39, 40, 1),)


def test_short_prompts_take_turns_with_many_options() -> None:
    """However many questions with more options than a prompt has tokens are under way."""
    requests = LiveRequests()
    order = DeviceOrder(requests, max_num_seqs=8)

    def add(name: str, num_options: int, images: int = 0) -> Request:
        request = Request(submit(name), SamplingParams(), ByteDecoder(), clock=lambda: 0.0)
        request.move_to(State.PREPARING)
        options = tuple((i, i) for i in range(num_options))
        request.on_prepared(prepared(replace(prompt(name, images), options=options)), 0)
        request.admit(0)
        requests.enqueue(request)
        return request

    for name, num_options in (("first", 400), ("second", 300)):
        question = add(name, num_options, images=1)
        question.move_to(State.PREFILL)
        question.is_known_to_runner = True
        question.num_prefilled = question.prompt.num_tokens
    picture = add("picture", 0, images=1)
    assert order.next_to_encode(during=None) is picture
    picture.move_to(State.PREFILL)
    turns = list[str]()
    for _ in range(4):
        turn = order.next_to_prefill()
        assert turn is not None
        order.start_chunk(turn)
        turn.num_scored += turn is not picture
        turns.append(turn.request_id)
    assert turns == ["first", "picture"] * 2
