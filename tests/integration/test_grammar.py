"""Answers held to a JSON schema conform, and leave other rows unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.harness import GREEDY, EngineHarness, NewEngine, ask
from tests.integration.schemas import SHAPE, conforming_answer, schema_sampling
from tests.support.images import random_image
from vlm_server.interfaces import SeqId
from vlm_server.prompt.grammar.constraints import SCHEMA_PARAM
from vlm_server.protocol import Failed, Finished, SamplingParams

pytestmark = pytest.mark.families()

GREEDY_SCORED = SamplingParams(max_tokens=1, temperature=0.0, logprobs=3)
DEEP: Any = {"anyOf": [{"type": "object", "properties": {f"k{i}": {}}} for i in range(700)]}
"""Compiles, but has too many ways to go on after the first brace."""


# ---- in the engine -------------------------------------------------------------------


def test_json_answer_conforms_to_schema_in_every_family(new_engine: NewEngine):
    engine = new_engine()
    engine.add(ask("a", random_image(1), "what?", sampling=schema_sampling(SHAPE)))
    engine.add(ask("b", "what?", sampling=schema_sampling(SHAPE, seed=1)))
    engine.run()
    conforming_answer(engine, "a", SHAPE)
    conforming_answer(engine, "b", SHAPE)


def test_constrained_and_free_rows_answer_as_alone(new_qwen_engine: Callable[[], EngineHarness]):
    free = SamplingParams(max_tokens=40, temperature=1.2, top_p=0.9, seed=5, logprobs=2)
    asked = {
        "greedy": ask("greedy", "a text", sampling=schema_sampling(SHAPE)),
        "free": ask("free", "a text", sampling=replace_tokens(GREEDY, 60)),
        "drawn": ask("drawn", random_image(2), "and?", sampling=schema_sampling(SHAPE, seed=7)),
        "free drawn": ask("free drawn", random_image(1), sampling=free),
        "other": ask(
            "other", "a text", sampling=schema_sampling({"type": "integer", "maximum": 5})
        ),
        "penalized": ask(
            "penalized",
            "a text",
            sampling=schema_sampling(
                SHAPE, seed=3, top_p=0.8, repetition_penalty=1.3, logit_bias={9: 50}
            ),
        ),
    }
    alone = {name: new_qwen_engine().answer(each) for name, each in asked.items()}
    together = new_qwen_engine()
    for each in asked.values():
        together.add(each)
        together.step(4)
    together.run()
    assert together.tokens == alone
    for name in ("greedy", "drawn", "penalized"):
        conforming_answer(together, name, SHAPE)
    assert alone["greedy"] != alone["drawn"]


def replace_tokens(sampling: SamplingParams, max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=sampling.temperature)


@pytest.mark.whole
def test_ended_constrained_row_leaves_other_answers_unchanged(
    new_qwen_engine: Callable[[], EngineHarness],
):
    alone = new_qwen_engine().answer(ask("a", "a text", sampling=schema_sampling(SHAPE, seed=2)))
    engine = new_qwen_engine()
    for name in ("first", "a", "last"):
        engine.add(ask(name, "a text", sampling=schema_sampling(SHAPE, seed=2)))
    engine.step_until(lambda: len(engine.tokens.get("a", ())) > 5)
    engine.abort("first")
    engine.step(2)
    engine.abort("last")
    engine.run()
    assert engine.tokens["a"] == alone


def test_constrained_answer_ends_at_max_tokens(new_qwen_engine: Callable[[], EngineHarness]):
    engine = new_qwen_engine()
    assert (
        len(engine.answer(ask("a", "a text", sampling=schema_sampling(SHAPE, max_tokens=6)))) == 6
    )
    assert engine.finish_reasons[SeqId("a")] == "length"


def test_const_schema_yields_its_only_value(new_qwen_engine: Callable[[], EngineHarness]):
    schema = {"const": {"a\n": ["é\u2028", 1.5, None, "<|im_end|>"]}}
    engine = new_qwen_engine()
    engine.add(ask("a", "a text", sampling=schema_sampling(schema)))
    engine.run()
    assert engine.texts["a"] == json.dumps(schema["const"], ensure_ascii=False)
    conforming_answer(engine, "a", schema)


def test_stop_string_ends_constrained_answer(new_qwen_engine: Callable[[], EngineHarness]):
    engine = new_qwen_engine()
    engine.add(ask("a", "a text", sampling=schema_sampling(SHAPE, stop=('"count"',))))
    engine.run()
    assert engine.texts["a"].endswith('", ')
    assert isinstance(engine.ends["a"], Finished)


def test_constrained_logprobs_equal_unconstrained_ones(
    new_qwen_engine: Callable[[], EngineHarness],
):
    engine = new_qwen_engine()
    engine.add(ask("free", "a text", sampling=GREEDY_SCORED))
    engine.add(ask("held", "a text", sampling=schema_sampling(SHAPE, max_tokens=1, logprobs=3)))
    engine.run()
    (free,), (held,) = engine.logprobs["free"], engine.logprobs["held"]
    assert held.top == free.top
    assert held.token.text == "{"
    assert held.token.logprob < free.token.logprob


def test_stuck_grammar_fails_only_its_request(new_qwen_engine: Callable[[], EngineHarness]):
    alone = new_qwen_engine().answer(ask("free", "a text"))
    engine = new_qwen_engine()
    engine.add(ask("free", "a text"))
    engine.step(2)
    engine.add(ask("stuck", "a text", sampling=schema_sampling(DEEP)))
    engine.add(ask("held", "a text", sampling=schema_sampling(SHAPE)))
    engine.run()
    end = engine.ends["stuck"]
    assert isinstance(end, Failed)
    assert (end.code, end.param) == ("invalid_value", SCHEMA_PARAM)
    assert engine.tokens["free"] == alone
    conforming_answer(engine, "held", SHAPE)


def test_invalid_schema_fails_only_its_request(new_qwen_engine: Callable[[], EngineHarness]):
    engine = new_qwen_engine()
    engine.add(ask("free", "a text"))
    end = engine.failure(ask("wrong", "a text", sampling=schema_sampling({"type": "text"})))
    assert (end.code, end.param) == ("invalid_value", SCHEMA_PARAM)
    assert isinstance(engine.ends["free"], Finished)
