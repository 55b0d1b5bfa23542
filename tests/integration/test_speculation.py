"""Verified drafts change no answer, however good or bad they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.integration.harness import EngineHarness, Load, NewEngine, Served, ask, prepare
from tests.integration.kv_columns import columns_of
from tests.integration.oracle import Oracle
from tests.integration.prompts import LONGER, PROMPTS, prompt_request
from tests.integration.schemas import SHAPE, conforming_answer, schema_sampling
from tests.support.images import random_image
from tests.support.whole_run import few_of
from vlm_server.cache.caches import Caches
from vlm_server.errors import RequestError
from vlm_server.interfaces import AnswerMatcher, SeqId
from vlm_server.protocol import Finished, SamplingParams
from vlm_server.runner.decode import sequence
from vlm_server.runner.decode.speculation import Speculation, speculation_of

pytestmark = pytest.mark.families("caches", "rope", "batches")

Answers = dict[SeqId, list[int]]


@pytest.fixture
def eligible(served: Served) -> None:
    if not speculation_of(served[0], 15).widths:
        pytest.skip("this family's layers can't forget tokens")


@pytest.fixture(params=few_of([0.0, 0.3, 1.0], [0.3]), ids=["right", "mixed", "wrong"])
def oracle_drafting(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[EngineHarness], None]:
    """Make later engines draft the answers of another engine."""

    def install(engine: EngineHarness) -> None:
        answers: dict[tuple[int, ...], list[list[int]]] = {}
        for seq, tokens in engine.seqs.items():
            key = tuple(engine.prompts[seq.request_id].token_ids.tolist())
            answers.setdefault(key, []).append(tokens)
        monkeypatch.setattr(sequence, "Drafter", Oracle(answers, request.param))

    return install


def run_all(engine: EngineHarness, params: SamplingParams, stagger: int = 0) -> Answers:
    for name in PROMPTS:
        engine.add(prompt_request(name, params))
        engine.step(stagger)
    engine.run()
    return answer_tokens(engine, params)


def answer_tokens(engine: EngineHarness, params: SamplingParams) -> Answers:
    """The tokens of answers, without surplus tokens of the last step."""
    return {seq: tokens[: params.max_tokens] for seq, tokens in engine.seqs.items()}


def spec_counts(engine: EngineHarness) -> Any:
    return engine.scheduler.stats()


@pytest.mark.parametrize("stagger", [0, 3])
@pytest.mark.usefixtures("eligible")
def test_batched_speculative_answers_equal_plain_answers(
    new_engine: NewEngine,
    answered: EngineHarness,
    oracle_drafting: Callable[[EngineHarness], None],
    stagger: int,
):
    wide = new_engine(num_draft_tokens=15)
    oracle_drafting(answered)
    assert run_all(wide, LONGER, stagger) == answered.seqs
    assert wide.texts == answered.texts
    assert spec_counts(wide).spec_drafts > 0


@pytest.mark.usefixtures("eligible")
def test_kv_after_drafts_equals_kv_without(
    new_engine: NewEngine,
    answered: EngineHarness,
    oracle_drafting: Callable[[EngineHarness], None],
):
    """Wide and plain steps alternate, and rows keep different numbers of tokens."""

    def plain(engine: EngineHarness) -> None:
        for name in PROMPTS:
            engine.add(prompt_request(name, LONGER))

    wanted = columns_of(new_engine, plain)
    if not any(columns.arrays for columns in wanted.values()):
        pytest.skip("this family's layers store no KV of single tokens")

    def wide(engine: EngineHarness) -> None:
        for number, name in enumerate(PROMPTS):
            engine.add(prompt_request(name, LONGER))
            engine.step(number)

    oracle_drafting(answered)
    found = columns_of(partial(new_engine, num_draft_tokens=5), wide)
    for name in PROMPTS:
        found[name].check_equal(wanted[name], 16)


@pytest.mark.usefixtures("eligible")
def test_single_speculative_answer_equals_plain_answer(
    new_engine: NewEngine, answered: EngineHarness, oracle_drafting: Callable[[EngineHarness], None]
):
    wide = new_engine(num_draft_tokens=7)
    oracle_drafting(answered)
    wanted = answered.tokens["images"]
    assert wide.answer(prompt_request("images", LONGER))[: LONGER.max_tokens] == wanted


# ---- every way to draw; models with three positions a token, with one, and with even rows -------

WAYS = {
    "seeded": SamplingParams(max_tokens=30, temperature=1.2, top_p=0.9, seed=5),
    "choices": SamplingParams(max_tokens=30, temperature=1.5, top_k=40, seed=7, n=3),
    "penalties": SamplingParams(
        max_tokens=30,
        temperature=0.0,
        frequency_penalty=0.9,
        presence_penalty=0.4,
        repetition_penalty=1.2,
        logit_bias={5: 3.0, 9: -100.0},
        min_tokens=12,
    ),
    "scored": SamplingParams(max_tokens=30, temperature=0.8, min_p=0.05, seed=3, logprobs=4),
    "held": schema_sampling(SHAPE),
    "held and drawn": schema_sampling(SHAPE, seed=2, n=2),
}


@pytest.fixture(params=["qwen2_5_vl", "llava", "qwen3_vl_moe"])
def new_family_engine(request: pytest.FixtureRequest, load_tiny: Load) -> NewEngine:
    return lambda **limits: EngineHarness(*load_tiny(request.param), **limits)


def ask_all(engine: EngineHarness) -> EngineHarness:
    for number, (name, params) in enumerate(WAYS.items()):
        engine.add(ask(name, "tell", random_image(number), "me more", sampling=params))
        engine.step(number)
    engine.run()
    return engine


def test_sampled_speculative_answers_equal_plain_answers(
    new_family_engine: NewEngine, oracle_drafting: Callable[[EngineHarness], None]
):
    plain = ask_all(new_family_engine(max_num_seqs=12))
    oracle_drafting(plain)
    wide = ask_all(new_family_engine(max_num_seqs=12, num_draft_tokens=15))
    assert wide.seq_texts == plain.seq_texts
    assert wide.finish_reasons == plain.finish_reasons
    assert conforming_answer(wide, "held", SHAPE)
    for one, other in zip(wide.logprobs["scored"], plain.logprobs["scored"], strict=True):
        assert one.token.text == other.token.text
        assert one.token.logprob == pytest.approx(other.token.logprob, abs=1e-3)
        assert [top.text for top in one.top] == [top.text for top in other.top]


def test_drafts_are_used_in_repetitive_answers(new_family_engine: NewEngine):
    """A logit bias makes the answer repeat itself."""
    params = SamplingParams(max_tokens=60, temperature=0.0, logit_bias={7: 200.0})
    plain, wide = new_family_engine(), new_family_engine(num_draft_tokens=15)
    wanted = plain.answer(ask("a", "say", sampling=params))
    assert wide.answer(ask("a", "say", sampling=params))[:60] == wanted
    counts = spec_counts(wide)
    assert 30 < counts.spec_accepted_tokens <= 60
    usage = wide.ends["a"].usage
    assert usage.completion_tokens == 60
    assert usage.accepted_prediction_tokens == counts.spec_accepted_tokens
    assert (
        usage.accepted_prediction_tokens + usage.rejected_prediction_tokens
        == counts.spec_draft_tokens
    )


@dataclass
class EndsAfterTwo:
    """Lets two tokens be drawn, then the end, and nothing after that."""

    end: int
    size: int
    told: int = 0
    fault: RequestError | None = None
    can_look_ahead: bool = False
    forced: tuple[int, ...] = ()

    def begin(self, count: int) -> Sequence[AnswerMatcher]:
        return [replace(self) for _ in range(count)]

    def advance(self, token_ids: Sequence[int]) -> None:
        self.told += len(token_ids)

    def look_ahead(self, token_ids: Sequence[int]) -> None:
        raise AssertionError("it can't")

    def draft_masks(self) -> Sequence[NDArray[np.bool_]]:
        return ()

    def wait(self, seconds: float) -> bool:
        return True

    def allowed(self) -> NDArray[np.bool_]:
        mask = np.full(self.size, self.told < 2)
        mask[self.end] = self.told == 2
        return mask

    def lower_priority(self) -> None:
        raise AssertionError("nobody waits for it")

    def close(self) -> None:
        pass


def test_ended_answer_needs_no_further_token(
    new_family_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
):
    """A wide step still samples a token for an ended sequence if others have drafts."""
    engine = new_family_engine(num_draft_tokens=15)
    can_gain = Speculation.can_gain
    monkeypatch.setattr(Speculation, "can_gain", lambda *_: False)
    host = engine.loaded.spec
    ended = ask("ended", "a text", sampling=LONGER)
    made = prepare(engine.preparer, ended)
    grammar = EndsAfterTwo(min(host.eos_token_ids), host.vocabulary_size)
    prompt = replace(made.prompt, grammar=grammar)
    engine.preparers.outcomes["ended"] = replace(made, prompt=prompt)
    repeating = SamplingParams(max_tokens=60, temperature=0.0, logit_bias={7: 200.0})
    engine.add(ask("repeating", "say", sampling=repeating))
    engine.step_until(lambda: len(engine.tokens.get("repeating", ())) > 20)
    engine.add(ended)
    engine.step_until(lambda: len(engine.tokens.get("ended", ())) == 2)
    monkeypatch.setattr(Speculation, "can_gain", can_gain)
    engine.step()
    assert spec_counts(engine).spec_drafts > 0
    engine.run()
    end = engine.ends["ended"]
    assert isinstance(end, Finished), end
    assert end.usage.completion_tokens == 3


def test_abort_and_join_change_no_speculative_answer(
    new_family_engine: NewEngine, oracle_drafting: Callable[[EngineHarness], None]
):
    names = ("text", "image", "images")
    plain = new_family_engine()
    for name in names:
        plain.add(prompt_request(name, LONGER))
    plain.run()
    oracle_drafting(plain)
    wide = new_family_engine(num_draft_tokens=5, chunk_tokens=16)
    wide.add(prompt_request("text", LONGER))
    wide.add(prompt_request("images", LONGER))
    wide.step_until(lambda: len(wide.tokens.get("images", ())) > 4)
    wide.abort("text")
    wide.add(prompt_request("image", LONGER))
    wide.run()
    for name in names[1:]:
        assert wide.tokens[name][:24] == plain.tokens[name]


def test_stored_speculative_answer_equals_its_sampled_tokens(
    new_family_engine: NewEngine, oracle_drafting: Callable[[EngineHarness], None]
):
    """The next turn finds the answer in the prefix cache, and answers as without one."""

    def second(engine: EngineHarness, answer: str) -> list[int]:
        return engine.answer(ask("second", "go on", answer, "and then?", sampling=LONGER))[:24]

    plain, without = new_family_engine(), new_family_engine()
    plain.answer(ask("first", "go on", sampling=LONGER))
    wanted = second(without, plain.texts["first"])
    oracle_drafting(plain)
    cached = new_family_engine(num_draft_tokens=15, caches=Caches(prefix_bytes=1 << 30))
    cached.answer(ask("first", "go on", sampling=LONGER))
    assert cached.texts["first"] == plain.texts["first"]
    oracle_drafting(without)
    assert second(cached, plain.texts["first"]) == wanted
