"""A grammar that is late: its request skips steps, and others go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.integration.harness import EngineHarness, Load, ask, new_grammars, new_preparer, prepare
from tests.integration.schemas import SHAPE, conforming_answer, schema_sampling
from tests.support.images import random_image
from tests.support.whole_run import few_of
from vlm_server.errors import RequestError
from vlm_server.interfaces import AnswerMatcher, Grammar
from vlm_server.prompt.grammar.constraints import SCHEMA_PARAM
from vlm_server.protocol import Failed, SamplingParams, Submit

SLOW = {"type": "string", "pattern": "^a{99999}$"}
"""Takes 25 ms and more for each token."""
FREE = SamplingParams(max_tokens=120, temperature=1.1, seed=3)


@dataclass
class Delay:
    """Switch that makes matchers late, with counts of their calls."""

    is_late: bool = False
    num_late: int = 0
    num_closed: int = 0
    yielded: bool = False


@dataclass
class SlowMatcher:
    """A real matcher that is late when the test says so."""

    inner: AnswerMatcher
    delay: Delay
    has_asked: bool = False

    @property
    def error(self) -> RequestError | None:
        return self.inner.error

    @property
    def can_look_ahead(self) -> bool:
        return self.inner.can_look_ahead

    @property
    def forced(self) -> Sequence[int]:
        return self.inner.forced

    def advance(self, token_ids: Sequence[int]) -> None:
        self.has_asked = True
        self.inner.advance(token_ids)

    def look_ahead(self, token_ids: Sequence[int]) -> None:
        self.inner.look_ahead(token_ids)

    def draft_masks(self) -> Sequence[NDArray[np.bool_]]:
        return self.inner.draft_masks()

    def wait(self, seconds: float) -> bool:
        if self.has_asked and self.delay.is_late:
            self.delay.num_late += 1
            return False
        assert self.inner.wait(30)
        return True

    def allowed(self) -> NDArray[np.bool_]:
        self.has_asked = False
        return self.inner.allowed()

    def lower_priority(self) -> None:
        self.delay.yielded = True

    def close(self) -> None:
        self.delay.num_closed += 1
        self.inner.close()


@dataclass
class SlowGrammar:
    inner: Grammar
    delay: Delay

    def begin(self, count: int) -> Sequence[AnswerMatcher]:
        return [SlowMatcher(each, self.delay) for each in self.inner.begin(count)]


def add_slow(engine: EngineHarness, submit: Submit) -> Delay:
    """Add a request whose grammar is late from now on."""
    prepared, delay = prepare(engine.preparer, submit), Delay()
    assert prepared.prompt.grammar is not None
    prompt = replace(prepared.prompt, grammar=SlowGrammar(prepared.prompt.grammar, delay))
    engine.preparers.outcomes[submit.request_id] = replace(prepared, prompt=prompt)
    engine.add(submit)
    return delay


@pytest.fixture(params=few_of(["qwen3_vl", "gemma3", "qwen3_5"], ["qwen3_5"]))
def new_family_engine(
    load_tiny: Load, request: pytest.FixtureRequest
) -> Callable[[], EngineHarness]:
    """An engine with plain KV, one with windows, and one with states that can't be cut."""
    return lambda: EngineHarness(*load_tiny(request.param))


@pytest.mark.parametrize("n", few_of([1, 3], [3]))
def test_late_grammars_change_no_answer(new_family_engine: Callable[[], EngineHarness], n: int):
    held = ask("held", random_image(2), "and?", sampling=schema_sampling(SHAPE, seed=7, n=n))
    free = ask("free", "a text", sampling=FREE)
    prompt = ask("prompt", "another text", sampling=schema_sampling(SHAPE, seed=1))
    wanted = {}
    for each in (held, free, prompt):
        alone = new_family_engine()
        alone.answer(each)
        wanted |= alone.seqs
    engine = new_family_engine()
    engine.add(free)
    engine.add(prompt)
    delay = add_slow(engine, held)
    engine.step_until(lambda: len(engine.tokens.get("held", ())) > 2)
    for steps in (1, 3, 7, 2):
        delay.is_late = True
        before = len(engine.tokens["held"]), len(engine.tokens["free"])
        engine.step(steps)
        assert len(engine.tokens["held"]) - before[0] <= 1
        assert len(engine.tokens["free"]) - before[1] >= steps
        delay.is_late = False
        engine.step(2)
    engine.run()
    assert engine.seqs == wanted
    assert delay.yielded
    assert delay.num_closed == n
    conforming_answer(engine, "held", SHAPE)


@pytest.mark.whole
def test_recovered_grammar_rejoins_decode_batch(new_family_engine: Callable[[], EngineHarness]):
    schema = {"type": "string", "minLength": 250, "maxLength": 250, "pattern": "^[a-z]*$"}
    held = ask("held", "a text", sampling=schema_sampling(schema, max_tokens=500))
    alone = new_family_engine().answer(held)
    engine = new_family_engine()
    engine.add(ask("free", "a text", sampling=replace_tokens(500)))
    delay = add_slow(engine, held)
    engine.step_until(lambda: len(engine.tokens.get("held", ())) > 2)
    delay.is_late = True
    engine.step(3)
    delay.is_late = False
    groups = engine.runner._groups
    assert len(groups._detached) == 1
    engine.step_until(lambda: not groups._detached)
    assert "held" not in engine.ends
    engine.run()
    assert engine.tokens["held"] == alone


def replace_tokens(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


def test_lone_late_grammar_causes_no_busy_loop(new_family_engine: Callable[[], EngineHarness]):
    engine = new_family_engine()
    delay = add_slow(engine, ask("held", "a text", sampling=schema_sampling(SHAPE)))
    engine.step_until(lambda: len(engine.tokens.get("held", ())) > 2)
    delay.is_late = True
    engine.step(3)
    num_late = delay.num_late
    engine.step(5)
    assert delay.num_late - num_late <= 10
    delay.is_late = False
    engine.run()
    conforming_answer(engine, "held", SHAPE)


def test_aborted_request_with_late_grammar_closes_its_grammars(
    new_family_engine: Callable[[], EngineHarness],
):
    engine = new_family_engine()
    engine.add(ask("free", "a text", sampling=FREE))
    delay = add_slow(engine, ask("held", "a text", sampling=schema_sampling(SHAPE, n=2)))
    engine.step_until(lambda: len(engine.tokens.get("held", ())) > 2)
    delay.is_late = True
    engine.step(3)
    engine.abort("held")
    engine.run()
    assert delay.num_closed == 2
    assert not engine.runner._groups._detached
    assert not engine.runner._groups._num_detachments


def test_killed_grammar_process_fails_only_its_request(
    new_family_engine: Callable[[], EngineHarness],
):
    engine = new_family_engine()
    alone = new_family_engine().answer(ask("free", "a text", sampling=FREE))
    engine.add(ask("free", "a text", sampling=FREE))
    engine.add(ask("held", "a text", sampling=schema_sampling(SHAPE)))
    engine.step_until(lambda: len(engine.tokens.get("held", ())) > 2)
    groups = engine.runner._groups  # a busy machine may have made it late, and apart
    seqs = [
        seq
        for batch in (groups._batch, *(each.batch for each in groups._detached.values()))
        for seq in batch._seqs
    ]
    (matcher,) = [seq.sampler.matcher for seq in seqs if seq.sampler.matcher]
    matcher._answers.process.kill()
    engine.run()
    end = engine.ends["held"]
    assert isinstance(end, Failed)
    assert (end.code, end.param) == ("invalid_value", SCHEMA_PARAM)
    assert engine.tokens["free"] == alone


@pytest.mark.alone
def test_slow_schema_does_not_slow_other_requests(load_tiny: Load):
    loaded, preparer = load_tiny("qwen3_vl")
    engine = EngineHarness(loaded, preparer)
    engine.add(ask("free", "a text", sampling=replace_tokens(300)))
    engine.add(ask("slow", "a text", sampling=schema_sampling(SLOW, n=4, max_tokens=300)))
    engine.step_until(lambda: "slow" in engine.tokens)
    started, before = time.perf_counter(), len(engine.tokens["free"])
    engine.step(50)
    assert len(engine.tokens["free"]) - before >= 50
    seconds = time.perf_counter() - started
    assert seconds < 50 * 0.025 * 4, "each step would have taken 0.1 s"
    engine.abort("slow")
    engine.run()


def test_schema_past_its_time_limit_fails_only_its_request(load_tiny: Load):
    loaded, _ = load_tiny("qwen3_vl")
    grammars = new_grammars(loaded.spec, follow_seconds=0.3)
    engine = EngineHarness(loaded, new_preparer(loaded, grammars=grammars))
    engine.add(ask("free", "a text", sampling=replace_tokens(30)))
    engine.add(ask("slow", "a text", sampling=schema_sampling(SLOW, max_tokens=300)))
    engine.add(ask("held", "a text", sampling=schema_sampling(SHAPE)))
    engine.run()
    end = engine.ends["slow"]
    assert isinstance(end, Failed)
    assert (end.code, end.param) == ("invalid_value", SCHEMA_PARAM)
    assert "too slow" in end.message
    conforming_answer(engine, "held", SHAPE)
    grammars.close()
