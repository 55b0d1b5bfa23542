"""Schemas and required calls of a model that answers in harmony's channels (gpt-oss)."""

from __future__ import annotations

import json
import re

import jsonschema
import msgspec
import pytest

from tests.integration.harness import EngineHarness, ask, load_model, new_preparer
from tests.integration.schemas import SHAPE
from tests.integration.test_forced_calls import (
    answers,
    check_calls,
    raw_texts,
    sampling,
    tools,
    with_tools,
)
from tests.tiny_models.fixtures import TinyModel
from vlm_server.interfaces import SeqId
from vlm_server.protocol import Finished, Submit, TemplateOptions
from vlm_server.runner.loaded import LoadedModel

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
COUNT = tools("count", parallel=False)
HEADED = re.compile(
    rf"({re.escape(ANALYSIS)}(?P<analysis>.*){re.escape(NEXT)})?{re.escape(FINAL)}(?P<final>.*)",
    re.DOTALL,
)
"""An answer in the final channel, perhaps after analysis."""


@pytest.fixture(scope="module")
def gpt_oss(tiny_model: TinyModel) -> LoadedModel:
    return load_model(tiny_model("gpt_oss", "harmony"))


@pytest.fixture
def engine(gpt_oss: LoadedModel) -> EngineHarness:
    return EngineHarness(gpt_oss, new_preparer(gpt_oss))


def with_thinking(submit: Submit, enabled: bool | None) -> Submit:
    return msgspec.structs.replace(submit, template=TemplateOptions(enable_thinking=enabled))


def likely(engine: EngineHarness, channel: str) -> dict[int, float]:
    """A bias that makes a random model choose a channel, by the first token of its name."""
    backend = engine.preparer._spec.backend
    return {backend.encode(channel, add_special_tokens=False).ids[0]: 1000.0}


def headed(engine: EngineHarness, request_id: str) -> list[tuple[str | None, str]]:
    """The analysis and the final text of each choice of a request."""
    end = engine.ends[request_id]
    assert isinstance(end, Finished), end
    matches = [HEADED.fullmatch(text) for text in raw_texts(engine, request_id)]
    assert all(matches), raw_texts(engine, request_id)
    return [(match["analysis"], match["final"]) for match in matches if match]


@pytest.mark.parametrize("enabled", [None, False])
def test_schema_holds_for_content_of_final_channel(engine: EngineHarness, enabled: bool | None):
    found = []
    for seed in range(6):
        params = sampling(seed, n=2, json_schema=json.dumps(SHAPE), max_reasoning_tokens=8)
        engine.add(with_thinking(ask(f"{seed}", "what?", sampling=params), enabled))
        engine.step(2)
    engine.run()
    for seed in range(6):
        for choice, (analysis, final) in enumerate(headed(engine, f"{seed}")):
            jsonschema.validate(json.loads(final), SHAPE)
            assert engine.seq_texts[SeqId(f"{seed}", choice)] == final
            found.append(analysis is not None)
    assert any(found) == (enabled is None)


@pytest.mark.parametrize(("budget", "channel"), [(0, "final"), (5, "analysis"), (5, "final")])
def test_required_call_follows_free_analysis(engine: EngineHarness, budget: int, channel: str):
    bias = likely(engine, channel)
    params = sampling(1, max_reasoning_tokens=budget, logit_bias=bias)
    engine.add(with_tools(ask("a", "what?", sampling=params), COUNT))
    engine.run()
    ((analysis, final),) = headed(engine, "a")
    assert final.startswith('[{"name": "count", "arguments": {')
    assert (analysis is not None) == (channel == "analysis")
    usage = engine.ends["a"].usage
    assert bool(usage.reasoning_tokens) == (channel == "analysis")
    check_calls(answers(engine, "a")[0], COUNT)


def test_schema_beside_tools_allows_final_channel_or_call(engine: EngineHarness):
    offered = tools("count", choice="auto", parallel=False)
    schema = json.dumps({"enum": ["a", "b"]})
    for channel in ("final", "commentary"):
        bias = likely(engine, channel)
        params = sampling(3, json_schema=schema, logit_bias=bias, max_tokens=40)
        asked = with_tools(ask(channel, "what?", sampling=params), offered)
        engine.add(with_thinking(asked, False))
    engine.run()
    ((_, final),) = headed(engine, "final")
    assert json.loads(final) in ("a", "b")
    (text,) = raw_texts(engine, "commentary")
    assert text.startswith("<|channel|>commentary to=")


def test_completion_of_raw_prompt_follows_schema_without_header(engine: EngineHarness):
    params = sampling(2, json_schema=json.dumps({"enum": ["a", "b"]}))
    engine.add(Submit("a", (), (), params, prompt=f"{NEXT}{FINAL}"))
    engine.run()
    (text,) = raw_texts(engine, "a")
    assert json.loads(text) in ("a", "b")


def test_schema_of_channels_does_not_depend_on_batch(gpt_oss: LoadedModel):
    params = sampling(5, json_schema=json.dumps(SHAPE), max_reasoning_tokens=8)
    submits = [ask("schema", "what?", sampling=params), ask("free", "a text")]
    alone = [EngineHarness(gpt_oss, new_preparer(gpt_oss)).answer(each) for each in submits]
    both = EngineHarness(gpt_oss, new_preparer(gpt_oss))
    for each in submits:
        both.add(each)
        both.step(3)
    both.run()
    assert [both.tokens[each.request_id] for each in submits] == alone
