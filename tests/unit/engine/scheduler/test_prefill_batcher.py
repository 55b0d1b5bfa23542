"""Batched prefills in the real loop: which prompts share a call, without delaying a first token."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.whole_run import few_of
from tests.unit.engine.driver import SteppedEngine
from tests.unit.engine.fakes import FakeMemory, answer_text, answer_texts, prepared, prompt
from vlm_server.cache.caches import Caches
from vlm_server.engine.request.states import State
from vlm_server.errors import OutOfMemory
from vlm_server.interfaces import SchedulerOutput, StepResult
from vlm_server.protocol import Failed, OnDevice

Device = Callable[[SchedulerOutput], float]
SIZES = (6, 14, 30, 60)
"""Tokens of prompts."""


def gpu(plan: SchedulerOutput) -> float:
    """Launching takes most of it, unless there are many tokens."""
    return max(0.010 + 0.0001 * len(plan.prefills), 0.0001 * plan.num_prefill_tokens)


def cpu(plan: SchedulerOutput) -> float:
    return 0.001 * plan.num_prefill_tokens


def new_engine(device: Device = gpu, most: int = 8, **options: object) -> SteppedEngine:
    """An engine that has measured its device."""
    limits = {"prefill_chunk_tokens": 256, "max_num_seqs": 64, "max_preparing": 99}
    limits |= {"context_tokens": 1000} | options
    engine = SteppedEngine(max_prompts_per_prefill=most, **limits)  # type: ignore[arg-type]
    engine.runner.prefill_seconds = device
    for size in SIZES:
        for _ in range(3):
            engine.add(f"{size}", text="w" * size, max_tokens=1)
            engine.run()
    for times in range(6):
        for size in SIZES:
            names = [f"{size} {times} {i}" for i in range(8)]
            engine.ready(*names, text="w" * size, max_tokens=1)
            engine.run()
    engine.events.clear()
    engine.plans.clear()
    return engine


def prefill_batches(engine: SteppedEngine) -> list[list[str]]:
    """The request ids of each prefill call, up to the end of all requests."""
    engine.run()
    assert engine.is_clean()
    plans = [plan for plan in engine.plans if plan.prefills]
    return [[work.request_id for work in plan.prefills] for plan in plans]


# ---- members of a batch ------------------------------------------------------------------


def test_waiting_prompts_are_prefilled_in_ordered_batches():
    engine = new_engine()
    engine.ready(*"abcdef")
    assert prefill_batches(engine) == [[*"abcd"], [*"ef"]]
    assert answer_texts(engine.events) == dict.fromkeys("abcdef", answer_text(prompt()))


def test_prompts_are_not_batched_on_device_without_gain():
    engine = new_engine(cpu)
    engine.ready(*"abc")
    assert prefill_batches(engine) == [["a"], ["b"], ["c"]]


def test_prompts_are_not_batched_if_limited_to_one():
    engine = new_engine(most=1)
    engine.ready(*"abc")
    assert prefill_batches(engine) == [["a"], ["b"], ["c"]]


def test_prompt_with_image_is_prefilled_alone_and_in_order():
    engine = new_engine()
    usual, engine.preparers.outcome = engine.preparers.outcome, None
    engine.add("a", "b")
    engine.add("c", images=1)
    engine.add("d", "e")
    engine.step()
    for name in "abcde":
        engine.preparers.finish(name)
    engine.preparers.outcome = usual
    found = prefill_batches(engine)
    assert ["c"] in found
    assert sorted(name for names in found for name in names) == [*"abcde"]


def test_atomic_prompt_is_prefilled_alone():
    """In a row of several it would attend to the padding."""
    engine = new_engine()
    usual, engine.preparers.outcome = engine.preparers.outcome, None
    engine.add(*"abcdef")
    engine.step()
    prompts = prompt()
    for name in "abcdef":
        atomic = prompts.num_tokens if name in "acd" else 0
        engine.preparers.finish(name, prepared(replace(prompts, atomic_prefill_tokens=atomic)))
    engine.preparers.outcome = usual
    found = prefill_batches(engine)
    assert all([name] in found for name in "acd")
    assert [*"ef"] in found


def test_batched_prefill_respects_max_num_seqs():
    engine = new_engine(max_num_seqs=16)
    engine.ready(*"abcd", n=5)
    assert prefill_batches(engine)[0] == [*"ab"]


def test_batched_prefill_respects_chunk_tokens():
    engine = new_engine(lambda plan: 0.01, prefill_chunk_tokens=64)
    engine.ready(*"abcdef", text="w" * 14)
    assert prefill_batches(engine)[0] == [*"abcd"]


def test_batched_prefill_respects_max_step_seconds_while_decoding():
    def slow(plan: SchedulerOutput) -> float:
        return 0.06 + 0.0001 * len(plan.prefills)

    engine = new_engine(slow, max_step_seconds=0.05)
    engine.add("first", max_tokens=100, ignore_eos=True)
    engine.step_until(lambda: engine.count(State.DECODE) == 1)
    engine.ready(*"abcd")
    assert [len(names) for names in prefill_batches(engine)] == [1] * 5


def test_batched_prompts_stay_whole_after_slow_chunks():
    """Each alone would be cut by then; the device did the batch in time before it was slow."""
    engine = new_engine()
    engine.runner.prefill_seconds = lambda plan: 0.1 * plan.num_prefill_tokens
    for _ in range(20):
        engine.add("slow", text="w" * 30, max_tokens=1)
        engine.run()
    engine.plans.clear()
    engine.ready(*"abcd", text="w" * 30)
    assert prefill_batches(engine) == [[*"abcd"]]


def test_prompts_too_large_for_device_are_not_batched():
    engine = new_engine()
    engine.runner.chunk_errors["a"] = [OutOfMemory("none")]
    engine.add("a", text="w" * 60)
    engine.run()
    engine.events.clear()
    engine.plans.clear()
    engine.ready(*"abcd", text="w" * 30)
    assert max(map(len, prefill_batches(engine))) == 1
    assert answer_texts(engine.events).keys() == set("abcd")


def test_batched_prefill_is_halved_to_fit_memory():
    def first_chunk(limit_bytes: int) -> list[str]:
        memory = FakeMemory(limit_bytes=limit_bytes)
        engine = new_engine(memory=memory)
        engine.governor.reset_stats()
        for num_tokens, mib in [(34, 8), (68, 32)]:
            engine.governor.estimator.begin("prefill")
            memory.peak_bytes = memory.active_bytes + (mib << 20)
            engine.governor.estimator.end("prefill", num_tokens)
        engine.ready(*"abcd", text=16 * "h", max_tokens=5)
        return prefill_batches(engine)[0]

    assert first_chunk(1 << 30) == [*"abcd"]
    assert first_chunk(20 << 20) == [*"ab"]


# ---- cached prefixes ---------------------------------------------------------------------


def add_texts(engine: SteppedEngine, **said: str) -> None:
    """Requests that may use what is cached."""
    prompts = {name: prepared(prompt(text), engine.caches) for name, text in said.items()}
    engine.preparers.outcome = lambda submitted: prompts[submitted.request_id]
    engine.add(*said)


def test_batched_prefill_starts_after_shortest_cached_prefix():
    """Some tokens more that are cached of one are computed again."""
    engine = new_engine(caches=Caches(prefix_bytes=1 << 20))
    add_texts(engine, one="hello you")
    engine.run()
    engine.plans.clear()
    add_texts(engine, a="hello you there", b="hello me")
    engine.run()
    (plan,) = [plan for plan in engine.plans if plan.prefills]
    assert [(w.request_id, w.start, w.end) for w in plan.prefills] == [("a", 6, 15), ("b", 6, 8)]
    assert engine.usages["a"].cached_tokens == engine.usages["b"].cached_tokens == 6
    assert engine.is_clean()


def test_prompt_with_long_cached_prefix_is_prefilled_alone():
    engine = new_engine(caches=Caches(prefix_bytes=1 << 20))
    add_texts(engine, one="x" * 100)
    engine.run()
    engine.plans.clear()
    add_texts(engine, a="x" * 100 + "y", b="y")
    assert prefill_batches(engine) == [["a"], ["b"]]


# ---- aborts and failures -----------------------------------------------------------------


def test_failed_prompt_leaves_rest_of_its_batch():
    engine = new_engine()
    engine.ready(*"abc")
    engine.runner.failing_prefills = {"b"}
    assert prefill_batches(engine)[0] == [*"ab"]
    assert [e.request_id for e in engine.events if isinstance(e, Failed)] == ["b"]
    assert answer_texts(engine.events) == dict.fromkeys("ac", answer_text(prompt()))


def test_batched_prefill_is_given_up_after_failures():
    """Each of their prompts was prefilled once more, alone."""
    engine = new_engine()
    launch = engine.runner.launch

    def failing(plan: SchedulerOutput) -> object:
        step = launch(plan)
        if plan.is_batched_prefill:
            brings = step.brings
            step.brings = StepResult(brings.tokens, brings.failures, error="too many")
        return step

    engine.runner.launch = failing  # type: ignore[method-assign, assignment]
    for times in range(6):
        engine.ready(*(f"{name}{times}" for name in "ab"))
        engine.run()
    engine.plans.clear()
    engine.ready(*"ab")
    assert prefill_batches(engine) == [["a"], ["b"]]


def test_batched_prompts_are_all_announced_on_device():
    """A crash is held against all of them."""
    engine = new_engine()
    engine.ready(*"ab")
    engine.run()
    working = [event.request_ids for event in engine.events if isinstance(event, OnDevice)]
    assert ("a", "b") in working


def test_abort_leaves_rest_of_prefill_batch():
    engine = new_engine()
    engine.ready(*"ab")
    engine.step()
    assert len(engine.plans[-1].prefills) == 2
    engine.abort("a")
    engine.run()
    assert answer_texts(engine.events)["b"] == answer_text(prompt())
    assert engine.is_clean()


# ---- first tokens come no later ----------------------------------------------------------


def first_tokens(device: Device, most: int, sizes: dict[str, int]) -> dict[str, float]:
    """The end of each prompt's prefill, in seconds from their common arrival."""
    engine = new_engine(device, most)
    for name, size in sizes.items():
        engine.add(name, text=name * size)
    now, found = 0.0, dict[str, float]()
    while len(found) < len(sizes):
        plan = engine.step()
        now += device(plan) if plan.prefills else 0.0
        found |= {work.request_id: now for work in plan.prefills if work.is_last}
        assert len(engine.plans) < 300
    return found


@pytest.mark.parametrize("seed", few_of(range(12), range(4)))
@pytest.mark.parametrize("device", [gpu, cpu])
def test_batched_prefill_delays_no_first_token(device: Device, seed: int):
    """But for a tenth of what the first of those takes that share a call."""
    drawn = random.Random(seed)
    names = "abcdefghij"[: drawn.randint(1, 10)]
    sizes = {name: drawn.choice(SIZES) for name in names}
    in_turn, shared = first_tokens(device, 1, sizes), first_tokens(device, 8, sizes)
    for name in names:
        assert shared[name] <= 1.1 * in_turn[name] + 1e-9, (sizes, in_turn, shared)


def test_batched_prefill_speeds_up_simultaneous_prompts():
    in_turn = first_tokens(gpu, 1, dict.fromkeys("abcdefgh", 6))
    shared = first_tokens(gpu, 8, dict.fromkeys("abcdefgh", 6))
    assert shared["a"] <= 1.1 * in_turn["a"]
    assert shared["h"] < in_turn["h"] / 6
