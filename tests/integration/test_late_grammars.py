"""A grammar that is late: its request skips steps, and others go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.integration.harness import EngineHarness, ask, new_grammars, new_preparer, prepare
from tests.integration.test_grammar import SHAPE, conforming_answer, schema_sampling
from tests.support.images import random_image
from tests.support.whole_run import few_of
from vlm_server.errors import RequestError
from vlm_server.interfaces import AnswerMatcher, Grammar
from vlm_server.prompt.grammar.constraints import SCHEMA_PARAM
from vlm_server.prompt.preparer import MultimodalPreparer
from vlm_server.protocol import Failed, SamplingParams, Submit
from vlm_server.runner.loaded import LoadedModel

Load = Callable[[str], tuple[LoadedModel, MultimodalPreparer]]
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
    made, delay = prepare(engine.preparer, submit), Delay()
    assert made.prompt.grammar is not None
    prompt = replace(made.prompt, grammar=SlowGrammar(made.prompt.grammar, delay))
    engine.preparers.outcomes[submit.request_id] = replace(made, prompt=prompt)
    engine.add(submit)
    return delay


@pytest.fixture(params=few_of(["qwen3_vl", "gemma3", "qwen3_5"], ["qwen3_5"]))
def engine(load_tiny: Load, request: pytest.FixtureRequest) -> Callable[[], EngineHarness]:
    """An engine with plain KV, one with windows, and one with states that can't be cut."""
    return lambda: EngineHarness(*load_tiny(request.param))


@pytest.mark.parametrize("n", few_of([1, 3], [3]))
def test_late_grammars_change_no_answer(engine: Callable[[], EngineHarness], n: int):
    held = ask("held", random_image(2), "and?", sampling=schema_sampling(SHAPE, seed=7, n=n))
    free = ask("free", "a text", sampling=FREE)
    prompt = ask("prompt", "another text", sampling=schema_sampling(SHAPE, seed=1))
    wanted = {}
    for each in (held, free, prompt):
        alone = engine()
        alone.answer(each)
        wanted |= alone.seqs
    made = engine()
    made.add(free)
    made.add(prompt)
    delay = add_slow(made, held)
    made.step_until(lambda: len(made.tokens.get("held", ())) > 2)
    for steps in (1, 3, 7, 2):
        delay.is_late = True
        before = len(made.tokens["held"]), len(made.tokens["free"])
        made.step(steps)
        assert len(made.tokens["held"]) - before[0] <= 1
        assert len(made.tokens["free"]) - before[1] >= steps
        delay.is_late = False
        made.step(2)
    made.run()
    assert made.seqs == wanted
    assert delay.yielded
    assert delay.num_closed == n
    conforming_answer(made, "held", SHAPE)


@pytest.mark.whole
def test_recovered_grammar_rejoins_decode_batch(engine: Callable[[], EngineHarness]):
    schema = {"type": "string", "minLength": 250, "maxLength": 250, "pattern": "^[a-z]*$"}
    held = ask("held", "a text", sampling=schema_sampling(schema, max_tokens=500))
    alone = engine().answer(held)
    made = engine()
    made.add(ask("free", "a text", sampling=replace_tokens(500)))
    delay = add_slow(made, held)
    made.step_until(lambda: len(made.tokens.get("held", ())) > 2)
    delay.is_late = True
    made.step(3)
    delay.is_late = False
    groups = made.runner._groups
    assert len(groups._detached) == 1
    made.step_until(lambda: not groups._detached)
    assert "held" not in made.ends
    made.run()
    assert made.tokens["held"] == alone


def replace_tokens(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


def test_lone_late_grammar_causes_no_busy_loop(engine: Callable[[], EngineHarness]):
    made = engine()
    delay = add_slow(made, ask("held", "a text", sampling=schema_sampling(SHAPE)))
    made.step_until(lambda: len(made.tokens.get("held", ())) > 2)
    delay.is_late = True
    made.step(3)
    num_late = delay.num_late
    made.step(5)
    assert delay.num_late - num_late <= 10
    delay.is_late = False
    made.run()
    conforming_answer(made, "held", SHAPE)


def test_aborted_request_with_late_grammar_closes_its_grammars(engine: Callable[[], EngineHarness]):
    made = engine()
    made.add(ask("free", "a text", sampling=FREE))
    delay = add_slow(made, ask("held", "a text", sampling=schema_sampling(SHAPE, n=2)))
    made.step_until(lambda: len(made.tokens.get("held", ())) > 2)
    delay.is_late = True
    made.step(3)
    made.abort("held")
    made.run()
    assert delay.num_closed == 2
    assert not made.runner._groups._detached
    assert not made.runner._groups._num_detachments


def test_killed_grammar_process_fails_only_its_request(engine: Callable[[], EngineHarness]):
    made = engine()
    alone = engine().answer(ask("free", "a text", sampling=FREE))
    made.add(ask("free", "a text", sampling=FREE))
    made.add(ask("held", "a text", sampling=schema_sampling(SHAPE)))
    made.step_until(lambda: len(made.tokens.get("held", ())) > 2)
    groups = made.runner._groups  # a busy machine may have made it late, and apart
    seqs = [
        seq
        for batch in (groups._batch, *(each.batch for each in groups._detached.values()))
        for seq in batch._seqs
    ]
    (matcher,) = [seq.sampler.matcher for seq in seqs if seq.sampler.matcher]
    matcher._answers.process.kill()
    made.run()
    end = made.ends["held"]
    assert isinstance(end, Failed)
    assert (end.code, end.param) == ("invalid_value", SCHEMA_PARAM)
    assert made.tokens["free"] == alone


@pytest.mark.alone
def test_slow_schema_does_not_slow_other_requests(load_tiny: Load):
    loaded, preparer = load_tiny("qwen3_vl")
    made = EngineHarness(loaded, preparer)
    made.add(ask("free", "a text", sampling=replace_tokens(300)))
    made.add(ask("slow", "a text", sampling=schema_sampling(SLOW, n=4, max_tokens=300)))
    made.step_until(lambda: "slow" in made.tokens)
    started, before = time.perf_counter(), len(made.tokens["free"])
    made.step(50)
    assert len(made.tokens["free"]) - before >= 50
    seconds = time.perf_counter() - started
    assert seconds < 50 * 0.025 * 4, "each step would have taken 0.1 s"
    made.abort("slow")
    made.run()


def test_schema_past_its_time_limit_fails_only_its_request(load_tiny: Load):
    loaded, _ = load_tiny("qwen3_vl")
    grammars = new_grammars(loaded.spec, follow_seconds=0.3)
    made = EngineHarness(loaded, new_preparer(loaded, grammars=grammars))
    made.add(ask("free", "a text", sampling=replace_tokens(30)))
    made.add(ask("slow", "a text", sampling=schema_sampling(SLOW, max_tokens=300)))
    made.add(ask("held", "a text", sampling=schema_sampling(SHAPE)))
    made.run()
    end = made.ends["slow"]
    assert isinstance(end, Failed)
    assert (end.code, end.param) == ("invalid_value", SCHEMA_PARAM)
    assert "too slow" in end.message
    conforming_answer(made, "held", SHAPE)
    grammars.close()
