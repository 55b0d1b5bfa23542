"""Verified drafts change no answer, however good or bad they are."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.integration.harness import Engine, NewEngine, ask
from tests.integration.test_families import LONGER, PROMPTS, asked
from vlm_server.ports import SeqId
from vlm_server.prompt.preparer import MultimodalPreparer
from vlm_server.protocol import SamplingParams
from vlm_server.runner.model.load import LoadedModel
from vlm_server.runner.text import decode_batch
from vlm_server.runner.text.build import speculation_of

Served = tuple[LoadedModel, MultimodalPreparer]
Answers = dict[SeqId, list[int]]


class Oracle:
    """Drafts that are known to be right, but for some that are made wrong on purpose."""

    def __init__(self, answers: dict[tuple[int, ...], list[list[int]]], rate: float) -> None:
        self.answers, self.rate = answers, rate
        self.random = random.Random(1)

    def __call__(self, prompt_ids: NDArray[np.int32], prediction: Sequence[int]) -> OracleDrafter:
        return OracleDrafter(self, self.answers[tuple(prompt_ids.tolist())])


class OracleDrafter:
    probability = 1.0

    def __init__(self, oracle: Oracle, answers: list[list[int]]) -> None:
        self.oracle, self.answers = oracle, answers
        self.told: list[int] = []

    def append(self, token_id: int) -> None:
        self.told.append(token_id)

    def probabilities(self, count: int) -> list[float]:
        return [1.0] * count

    def guess(self, count: int) -> list[int]:
        count = self.oracle.random.randint(0, count)
        start = len(self.told)
        fitting = (a for a in self.answers if a[:start] == self.told)
        right = next(fitting, [])[start : start + count]
        wrong = self.oracle.random.random
        return [(t + 1) % 50 if wrong() < self.oracle.rate else t for t in right]


@pytest.fixture
def eligible(served: Served) -> None:
    if speculation_of(served[0], 15) is None:
        pytest.skip("this family's layers can't forget tokens")


@pytest.fixture(params=[0.0, 0.3, 1.0], ids=["right", "mixed", "wrong"])
def drafting(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Engine], None]:
    """Let engines from now on draft what another one answered."""

    def install(engine: Engine) -> None:
        answers: dict[tuple[int, ...], list[list[int]]] = {}
        for seq, tokens in engine.seqs.items():
            key = tuple(engine.prompts[seq.request_id].token_ids.tolist())
            answers.setdefault(key, []).append(tokens)
        monkeypatch.setattr(decode_batch, "Drafter", Oracle(answers, request.param))

    return install


def run_all(engine: Engine, params: SamplingParams, stagger: int = 0) -> Answers:
    for name in PROMPTS:
        engine.add(asked(name, params))
        engine.step(stagger)
    engine.run()
    return taken(engine, params)


def taken(engine: Engine, params: SamplingParams) -> Answers:
    """What answers took of the tokens that the runner brought: it may bring too many at the end."""
    return {seq: tokens[: params.max_tokens] for seq, tokens in engine.seqs.items()}


def spec_counts(engine: Engine) -> Any:
    return engine.scheduler.read().spec


@pytest.mark.parametrize("stagger", [0, 3])
@pytest.mark.usefixtures("eligible")
def test_batched_answers_are_equal(
    new_engine: NewEngine, drafting: Callable[[Engine], None], stagger: int
):
    plain, wide = new_engine(), new_engine(num_draft_tokens=15)
    wanted = run_all(plain, LONGER)
    drafting(plain)
    assert run_all(wide, LONGER, stagger) == wanted
    assert wide.texts == plain.texts
    assert spec_counts(wide).num_drafts > 0


@pytest.mark.usefixtures("eligible")
def test_one_answer_is_equal(new_engine: NewEngine, drafting: Callable[[Engine], None]):
    plain, wide = new_engine(), new_engine(num_draft_tokens=7)
    wanted = plain.answer(asked("pictures", LONGER))
    drafting(plain)
    assert wide.answer(asked("pictures", LONGER))[:24] == wanted
