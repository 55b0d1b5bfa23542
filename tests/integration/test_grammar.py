"""Answers held to a JSON schema conform, and leave other rows unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from tests.integration.harness import GREEDY, EngineHarness, NewEngine, ask
from tests.support.images import random_image
from vlm_server.interfaces import SeqId
from vlm_server.prompt.grammar.constraints import SCHEMA_PARAM
from vlm_server.prompt.preparer import MultimodalPreparer
from vlm_server.protocol import Failed, Finished, SamplingParams
from vlm_server.runner.loaded import LoadedModel

pytestmark = pytest.mark.families()

Load = Callable[[str], tuple[LoadedModel, MultimodalPreparer]]

SHAPE = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "grün", '\u2028"\\\n']},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "label": {"type": "string", "maxLength": 6},
        "filled": {"type": "boolean"},
    },
    "required": ["colour", "count", "label", "filled"],
    "additionalProperties": False,
}
GREEDY_SCORED = SamplingParams(max_tokens=1, temperature=0.0, logprobs=3)
DEEP: Any = {"anyOf": [{"type": "object", "properties": {f"k{i}": {}}} for i in range(700)]}
"""Compiles, but has too many ways to go on after the first brace."""


def schema_sampling(schema: Any, seed: int | None = None, **changes: Any) -> SamplingParams:
    """Greedy without a seed."""
    fields = {"max_tokens": 100, "temperature": 0.0 if seed is None else 1.5, "seed": seed}
    return SamplingParams(json_schema=json.dumps(schema), **fields | changes)


def conforming_answer(engine: EngineHarness, request_id: str, schema: Any) -> Any:
    """The answer of a request, checked against its schema."""
    end = engine.ends[request_id]
    assert isinstance(end, Finished), end
    assert engine.finish_reasons[SeqId(request_id)] == "stop"
    answer = json.loads(engine.texts[request_id])
    jsonschema.validate(answer, schema)
    return answer


@pytest.fixture
def engine(load_tiny: Load) -> Callable[[], EngineHarness]:
    return lambda: EngineHarness(*load_tiny("qwen3_vl"))


# ---- in the engine -------------------------------------------------------------------


def test_json_answer_conforms_to_schema_in_every_family(new_engine: NewEngine):
    made = new_engine()
    made.add(ask("a", random_image(1), "what?", sampling=schema_sampling(SHAPE)))
    made.add(ask("b", "what?", sampling=schema_sampling(SHAPE, seed=1)))
    made.run()
    conforming_answer(made, "a", SHAPE)
    conforming_answer(made, "b", SHAPE)


def test_constrained_and_free_rows_answer_as_alone(engine: Callable[[], EngineHarness]):
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
    alone = {name: engine().answer(each) for name, each in asked.items()}
    together = engine()
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
def test_ended_constrained_row_leaves_other_answers_unchanged(engine: Callable[[], EngineHarness]):
    alone = engine().answer(ask("a", "a text", sampling=schema_sampling(SHAPE, seed=2)))
    made = engine()
    for name in ("first", "a", "last"):
        made.add(ask(name, "a text", sampling=schema_sampling(SHAPE, seed=2)))
    made.step_until(lambda: len(made.tokens.get("a", ())) > 5)
    made.abort("first")
    made.step(2)
    made.abort("last")
    made.run()
    assert made.tokens["a"] == alone


def test_constrained_answer_ends_at_max_tokens(engine: Callable[[], EngineHarness]):
    made = engine()
    assert len(made.answer(ask("a", "a text", sampling=schema_sampling(SHAPE, max_tokens=6)))) == 6
    assert made.finish_reasons[SeqId("a")] == "length"


def test_const_schema_yields_its_only_value(engine: Callable[[], EngineHarness]):
    schema = {"const": {"a\n": ["é\u2028", 1.5, None, "<|im_end|>"]}}
    made = engine()
    made.add(ask("a", "a text", sampling=schema_sampling(schema)))
    made.run()
    assert made.texts["a"] == json.dumps(schema["const"], ensure_ascii=False)
    conforming_answer(made, "a", schema)


def test_stop_string_ends_constrained_answer(engine: Callable[[], EngineHarness]):
    made = engine()
    made.add(ask("a", "a text", sampling=schema_sampling(SHAPE, stop=('"count"',))))
    made.run()
    assert made.texts["a"].endswith('", ')
    assert isinstance(made.ends["a"], Finished)


def test_constrained_logprobs_equal_unconstrained_ones(engine: Callable[[], EngineHarness]):
    made = engine()
    made.add(ask("free", "a text", sampling=GREEDY_SCORED))
    made.add(ask("held", "a text", sampling=schema_sampling(SHAPE, max_tokens=1, logprobs=3)))
    made.run()
    (free,), (held,) = made.logprobs["free"], made.logprobs["held"]
    assert held.top == free.top
    assert held.token.text == "{"
    assert held.token.logprob < free.token.logprob


def test_stuck_grammar_fails_only_its_request(engine: Callable[[], EngineHarness]):
    alone = engine().answer(ask("free", "a text"))
    made = engine()
    made.add(ask("free", "a text"))
    made.step(2)
    made.add(ask("stuck", "a text", sampling=schema_sampling(DEEP)))
    made.add(ask("held", "a text", sampling=schema_sampling(SHAPE)))
    made.run()
    end = made.ends["stuck"]
    assert isinstance(end, Failed)
    assert (end.code, end.param) == ("invalid_value", SCHEMA_PARAM)
    assert made.tokens["free"] == alone
    conforming_answer(made, "held", SHAPE)


def test_invalid_schema_fails_only_its_request(engine: Callable[[], EngineHarness]):
    made = engine()
    made.add(ask("free", "a text"))
    made.add(ask("wrong", "a text", sampling=schema_sampling({"type": "text"})))
    made.run()
    end = made.ends["wrong"]
    assert isinstance(end, Failed)
    assert (end.code, end.param) == ("invalid_value", SCHEMA_PARAM)
    assert isinstance(made.ends["free"], Finished)
