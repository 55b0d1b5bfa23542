"""Options of questions have the log probabilities that a prompt ending with each would have."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from tests.integration.decisions import (
    OPTIONS,
    Asked,
    decide,
    decisions_of,
    logprobs_in_chunks,
    without_case,
)
from tests.integration.harness import (
    EngineHarness,
    Load,
    NewEngine,
    Part,
    Served,
    ask,
    caches_of,
    new_preparer,
)
from tests.integration.prompts import LONGER
from tests.integration.test_compiled_model import compiled
from tests.support.active_memory import active_bytes
from tests.support.images import random_image
from tests.support.integrity import check_integrity
from tests.support.selection import CORE_TEXTS
from vlm_server.interfaces import Branches, SchedulerOutput
from vlm_server.interfaces.model_spec import ReasoningFormat
from vlm_server.interfaces.prompts import MAX_OPTION_TOKENS
from vlm_server.protocol import Deadlines, Decision, Finished
from vlm_server.runner.kv.layers import can_store
from vlm_server.runner.model_runner import LaunchedStep
from vlm_server.runner.prefill.branches import OptionScore, greedy_option

RTOL, ATOL = 1e-4, 1e-4
PARTS: tuple[Part, ...] = ("Look at this:", random_image(1))
QUESTION = Asked("Which colour is it?")


def check(engine: EngineHarness, name: str, parts: Sequence[Part], decision: Decision) -> None:
    """Compare a decision with the options as chunks of longer prompts."""
    prompt = engine.prompts[name]
    scores = []
    for option in prompt.options:
        tokens, end, best_end = logprobs_in_chunks(engine, parts, prompt, option)
        scores.append(OptionScore(tuple(tokens), end, best_end))
    expected = [scores[place].total for place in prompt.option_places]
    np.testing.assert_allclose(decision.logprobs, expected, rtol=RTOL, atol=ATOL)
    assert prompt.option_places[decision.greedy] == greedy_option(prompt.options, scores)


@pytest.mark.families("caches", "rope")
def test_options_have_logprobs_of_longer_prompts(new_engine: NewEngine) -> None:
    engine = new_engine(chunk_tokens=16)
    for name, parts in (("picture", PARTS), ("text", ("A red apple.",))):
        (decision,) = decisions_of(engine, decide(name, parts, QUESTION))
        check(engine, f"{name}/0", parts, decision)


@pytest.mark.parametrize(
    "family", [*CORE_TEXTS, pytest.param("longcat_flash_ngram", marks=pytest.mark.whole)]
)
def test_options_of_text_models_have_logprobs_of_longer_prompts(
    family: str, load_tiny: Load
) -> None:
    engine = EngineHarness(*load_tiny(family), chunk_tokens=16)
    (decision,) = decisions_of(engine, decide("text", ("A red apple.",), QUESTION))
    assert len(decision.logprobs) == len(OPTIONS)
    check(engine, "text/0", (), decision)


# ---- whatever runs beside it -------------------------------------------------------------

QUESTIONS = (QUESTION, Asked("Is it round?", ("yes", "no")), Asked("And how many?", "0123"))


def assert_equal(decisions: Sequence[Decision], expected: Sequence[Decision]) -> None:
    for one, other in zip(decisions, expected, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=RTOL, atol=ATOL)
        assert one.greedy == other.greedy


@pytest.fixture
def alone(new_engine: NewEngine) -> list[Decision]:
    """The decisions of QUESTIONS, each in a request and an engine of its own."""
    return [decisions_of(new_engine(), decide(asked.text, PARTS, asked))[0] for asked in QUESTIONS]


@pytest.mark.families("caches", "prompts")
def test_decisions_are_equal_beside_answers_and_cached(
    new_engine: NewEngine, served: Served, alone: list[Decision]
) -> None:
    expected_tokens = new_engine().answer(ask("answer", "Hello", sampling=LONGER))
    engine = new_engine(chunk_tokens=16, caches=caches_of(served))
    engine.add(ask("answer", "Hello", sampling=LONGER))
    engine.step(4)
    engine.add(decide("other", ("Some text",), *QUESTIONS))
    assert_equal(decisions_of(engine, decide("first", PARTS, *QUESTIONS)), alone)
    assert engine.tokens["answer"] == expected_tokens
    assert_equal(decisions_of(engine, decide("again", PARTS, *QUESTIONS)), alone)
    check_integrity(engine.caches)
    assert engine.caches.num_references == 0


@pytest.mark.parametrize("family", ["qwen2_5_vl", "lfm2_vl", "gemma3"])
def test_decisions_of_compiled_models_are_equal(family: str, load_tiny: Load) -> None:
    """The prompt's chunks are parts of the steps of a running answer, where that is possible."""
    served = load_tiny(family)
    expected = decisions_of(EngineHarness(*served), decide("alone", PARTS, *QUESTIONS))
    engine, model = compiled(served, 24)
    expected_tokens = EngineHarness(*served).answer(ask("answer", "Hello", sampling=LONGER))
    engine.add(ask("answer", "Hello", sampling=LONGER))
    engine.step(6)
    assert_equal(decisions_of(engine, decide("beside", PARTS, *QUESTIONS)), expected)
    assert engine.tokens["answer"] == expected_tokens
    assert model.num_steps


@pytest.mark.families("caches")
@pytest.mark.parametrize("parts", [PARTS, ("A text about many things. " * 8,)])
def test_questions_share_their_conversation(
    parts: tuple[Part, ...], new_engine: NewEngine, served: Served
) -> None:
    engine = new_engine(caches=caches_of(served))
    decisions_of(engine, decide("many", parts, *QUESTIONS))
    prompts = [engine.prompts[f"many/{i}"] for i in range(len(QUESTIONS))]
    usage = engine.ends["many"].usage
    assert usage.prompt_tokens == sum(each.num_tokens for each in prompts)
    if can_store(engine.loaded.language_model) and not prompts[0].is_atomic:
        first, *later = (each.token_ids for each in prompts)
        same = (np.flatnonzero(first[: len(ids)] != ids[: len(first)])[0] for ids in later)
        assert usage.cached_tokens >= sum(same) - len(later)


def test_order_of_options_and_their_number_change_no_bit(load_tiny: Load) -> None:
    engine = EngineHarness(*load_tiny("qwen3_vl"))
    options = [*OPTIONS, *(f"option {i}" for i in range(40))]
    (forwards,) = decisions_of(engine, decide("a", PARTS, Asked("Which?", options)))
    (backwards,) = decisions_of(engine, decide("b", PARTS, Asked("Which?", options[::-1])))
    assert forwards.logprobs == backwards.logprobs[::-1]
    assert forwards.greedy == len(options) - 1 - backwards.greedy
    (few,) = decisions_of(engine, decide("c", PARTS, Asked("Which?", OPTIONS)))
    np.testing.assert_allclose(few.logprobs, forwards.logprobs[: len(OPTIONS)], rtol=RTOL)


@pytest.mark.parametrize("family", ["qwen3_vl", "lfm2_vl"])
def test_many_options_are_scored_in_groups_between_tokens_of_answers(
    family: str, load_tiny: Load
) -> None:
    """A step of a running answer has a bounded number of branches, and none is left out."""
    engine = EngineHarness(*load_tiny(family), chunk_tokens=64)
    options = [f"{i}" for i in range(400)]
    (expected,) = decisions_of(engine, decide("alone", ("Hi",), Asked("Which number?", options)))
    engine.add(ask("answer", "Hello", sampling=structs.replace(LONGER, max_tokens=60)))
    engine.step_until(lambda: bool(engine.tokens.get("answer")))
    sizes, tokens = list[int](), len(engine.tokens["answer"])
    launch = engine.runner.launch

    def recording(plan: SchedulerOutput) -> LaunchedStep:
        sizes.extend(chunk.num_branch_tokens for chunk in plan.prefills)
        return launch(plan)

    engine.runner.launch = recording
    engine.add(decide("many", ("Hi",), Asked("Which number?", options)))
    engine.step_until(lambda: "many" in engine.ends)
    steps = [size for size in sizes if size]
    assert len(steps) >= 4
    assert max(steps) <= MAX_OPTION_TOKENS
    assert len(engine.tokens["answer"]) >= tokens + len(steps) - 1
    engine.run()
    (decision,) = engine.ends["many"].decisions
    np.testing.assert_allclose(decision.logprobs, expected.logprobs, rtol=RTOL, atol=ATOL)
    assert len(set(decision.logprobs)) == 400


@pytest.mark.families("caches", "rope")
def test_option_in_parts_has_logprobs_of_whole_one(new_engine: NewEngine) -> None:
    """Parts of long options come between the steps of a running answer."""
    long = Asked("Which?", (*OPTIONS, "a long option " * 5, "another long option " * 3))
    (expected,) = decisions_of(new_engine(), decide("alone", PARTS, long))
    expected_tokens = new_engine().answer(ask("answer", "Hello", sampling=LONGER))
    engine = new_engine(chunk_tokens=16)
    sizer = engine.scheduler._planner._option_batcher._sizer
    sizer.record_failure(8)  # four tokens in each of the next 16 steps, then eight
    parts, launch = list[Branches](), engine.runner.launch

    def recording(plan: SchedulerOutput) -> LaunchedStep:
        parts.extend(each for chunk in plan.prefills for each in chunk.branches)
        return launch(plan)

    engine.runner.launch = recording
    engine.add(ask("answer", "Hello", sampling=LONGER))
    engine.step(6)
    assert_equal(decisions_of(engine, decide("parts", PARTS, long)), [expected])
    assert engine.tokens["answer"] == expected_tokens
    assert sum(each.start > 0 for each in parts) >= 4
    assert max(each.num_tokens for each in parts[:16]) <= 4


# ---- ends --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_vl", "lfm2_vl"])
def test_abort_ends_request_once_in_any_state(family: str, load_tiny: Load) -> None:
    served = load_tiny(family)
    options = [f"{i}" for i in range(600)]
    for num_steps in range(14):
        engine = EngineHarness(*served, caches=caches_of(served), chunk_tokens=32)
        engine.add(decide("aborted", PARTS, Asked("Which?", options), *QUESTIONS))
        engine.step(num_steps)
        engine.abort("aborted")
        engine.abort("aborted")
        engine.run()
        end = engine.ends["aborted"]
        assert isinstance(end, Finished)
        assert end.is_aborted
        check_integrity(engine.caches)
        assert engine.caches.num_references == 0


def test_memory_of_branches_returns_to_baseline(load_tiny: Load) -> None:
    engine = EngineHarness(*load_tiny("qwen3_vl"))
    options = [f"{i}" for i in range(200)]
    decisions_of(engine, decide("first", PARTS, Asked("Which?", options)))
    before = active_bytes()
    for i in range(4):
        decisions_of(engine, decide(f"{i}", PARTS, Asked("Which?", options)))
    assert active_bytes() <= before


def test_failed_branches_are_tried_again_in_smaller_groups(load_tiny: Load) -> None:
    engine = EngineHarness(*load_tiny("qwen3_vl"))
    (expected,) = decisions_of(engine, decide("alone", ("Hi",), QUESTION))
    engine.runner.launch = _failing_once(engine)
    assert_equal(decisions_of(engine, decide("again", ("Hi",), QUESTION)), [expected])


def _failing_once(engine: EngineHarness) -> Callable[[SchedulerOutput], LaunchedStep]:
    launch, left = engine.runner.launch, [MemoryError()]

    def failing(plan: SchedulerOutput) -> LaunchedStep:
        step = launch(plan)
        chunks = [chunk for chunk in plan.prefills if chunk.num_branch_tokens]
        if chunks and left:
            left.clear()
            engine.runner._end_prefill(
                chunks[0].request_id, RuntimeError("[malloc] Unable to allocate"), step.failures
            )
        return step

    return failing


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("", "a"), "0 tokens"),
        (("a", "long " * 400), "1 to 256"),
        (("a", "<|im_end|>"), "control token"),
        (("a", "\ud800"), "Unicode"),
    ],
)
def test_invalid_option_is_refused_by_its_question(
    options: tuple[str, ...], part: str, load_tiny: Load
) -> None:
    engine = EngineHarness(*load_tiny("qwen3_vl"))
    end = engine.failure(decide("bad", ("Hi",), QUESTION, Asked("Which?", options)))
    assert end.param == "questions.1"
    assert part in end.message


def test_model_that_writes_nothing_decides_nothing(load_tiny: Load) -> None:
    engine = EngineHarness(*load_tiny("qwen3_embedding"))
    end = engine.failure(decide("bad", ("Hi",), QUESTION))
    assert (end.code, end.param) == ("invalid_value", "model")


def test_deadline_ends_request_with_its_error(load_tiny: Load) -> None:
    engine = EngineHarness(*load_tiny("qwen3_vl"))
    late = structs.replace(
        decide("late", PARTS, *QUESTIONS), deadlines=Deadlines(total_timeout_seconds=0)
    )
    end = engine.failure(late)
    assert end.code == "total_timeout"


def test_equal_spellings_count_once(load_tiny: Load) -> None:
    loaded, _ = load_tiny("qwen3_vl")
    model = replace(loaded, spec=replace(loaded.spec, backend=without_case(loaded.spec)))
    engine = EngineHarness(model, new_preparer(model))
    both = Asked("Is it red?", ("yes", "Yes", "no", "No"), num_spellings=2)
    (decision,) = decisions_of(engine, decide("both", ("Hi",), both))
    (once,) = decisions_of(engine, decide("once", ("Hi",), Asked(both.text, ("yes", "no"))))
    yes, no = once.logprobs
    expected = (yes, -math.inf, no, -math.inf)
    np.testing.assert_allclose(decision.logprobs, expected, rtol=RTOL, atol=ATOL)
    assert decision.greedy == 2 * once.greedy


# ---- where options begin -----------------------------------------------------------------


@pytest.mark.parametrize(("written", "between"), [("", "<final>"), ("<think>", "<think></think>")])
def test_options_begin_where_text_without_reasoning_does(
    written: str, between: str, load_tiny: Load
) -> None:
    """`written`: what the template writes after the assistant's header."""
    loaded, _ = load_tiny("qwen3_vl")
    spec = replace(
        loaded.spec,
        reasoning_format=ReasoningFormat("<think>", "</think>", answer_header="<final>"),
        chat_template=f"{loaded.spec.chat_template}{written}",
    )
    model = replace(loaded, spec=spec)
    engine = EngineHarness(model, new_preparer(model))
    decisions_of(engine, decide("q", ("Hi",), QUESTION))
    prompt = spec.tokenizer.decode(engine.prompts["q/0"].token_ids)
    assert prompt.endswith(f"assistant\n{between}")
