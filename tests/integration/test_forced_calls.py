"""Required calls and reasoning in the engine are valid for any random model."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import msgspec
import pytest

from tests.integration.harness import EngineHarness, Load, ask, new_grammars, new_preparer, prepare
from tests.support.images import random_image
from tests.support.whole_run import few_of
from vlm_server.interfaces import SeqId
from vlm_server.interfaces.model_spec import ReasoningFormat, ToolParser
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.prompt.grammar.lark import arguments_schema
from vlm_server.prompt.grammar.reasoning_grammar import with_reasoning
from vlm_server.protocol import (
    Failed,
    Finished,
    SamplingParams,
    Submit,
    TemplateOptions,
    Tools,
)
from vlm_server.runner.loaded import LoadedModel

Call = tuple[str, dict[str, Any]]
"""Name and arguments."""

THINK = ReasoningFormat("<think>", "</think>")
POINT = {"type": "integer", "minimum": 0, "maximum": 1000}
TOOLS: dict[str, Any] = {
    "click": {
        "type": "object",
        "$defs": {"point": {"type": "array", "prefixItems": [POINT, POINT], "minItems": 2}},
        "properties": {"at": {"$ref": "#/$defs/at"}, "button": {"enum": ["left", "right"]}},
        "required": ["at"],
    },
    "type-text": {
        "properties": {"text": {"type": "string", "maxLength": 20}, "enter": {"type": "boolean"}},
        "required": ["text", "enter"],
        "additionalProperties": False,
    },
    "wait": {},
    "count": {
        "type": "object",
        "properties": {
            "shape": {"enum": ["circle", "square", "star"]},
            "colour": {"type": ["string", "null"], "pattern": "^[a-z]{3,8}$"},
            "number": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["shape", "colour", "number"],
    },
}
TOOLS["click"]["$defs"]["at"] = {
    "type": "object",
    "properties": {"x": POINT, "y": POINT},
    "required": ["x", "y"],
    "additionalProperties": False,
}

HERMES = ToolParser(
    "json_tools", "<tool_call>", "</tool_call>", parse=lambda text, _: json.loads(text)
)
NAMES_TOOLS = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"


def with_template(loaded: LoadedModel, **changes: Any) -> EngineHarness:
    """A model that is told the names of its tools, with other facts about it."""
    template = NAMES_TOOLS + str(loaded.spec.chat_template)
    host = replace(loaded.spec, chat_template=template, **changes)
    loaded = replace(loaded, spec=host)
    return EngineHarness(loaded, new_preparer(loaded, grammars=new_grammars(host)))


def tools(*names: str, **changes: Any) -> Tools:
    """The named tools of `TOOLS`, or all; one must be called."""
    listed = [
        {"type": "function", "function": {"name": name, "parameters": TOOLS[name]}}
        for name in names or TOOLS
    ]
    return Tools(json.dumps(listed), **{"choice": "required", **changes})


def sampling(seed: int, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 2000, "temperature": 1.0, "seed": seed, **changes})


def with_tools(submit: Submit, offered: Tools) -> Submit:
    return msgspec.structs.replace(submit, tools=offered)


def check_calls(calls: list[Call], offered: Tools) -> list[Call]:
    """`calls`, which are as `offered` wants them."""
    names = {each["function"]["name"] for each in json.loads(offered.definitions)}
    assert 1 <= len(calls) <= (16 if offered.parallel else 1)
    for name, arguments in calls:
        assert name in (offered.allowed or names)
        jsonschema.validate(arguments, arguments_schema(TOOLS[name]))
    return calls


def answers(engine: EngineHarness, request_id: str) -> list[list[Call]]:
    """The calls of a request's choices, each of which has ended by itself and has no text."""
    end = engine.ends[request_id]
    assert isinstance(end, Finished), end
    seqs = sorted(seq for seq in engine.seq_texts if seq.request_id == request_id)
    assert [engine.finish_reasons[seq] for seq in seqs] == ["tool_calls"] * len(seqs)
    assert [engine.seq_texts[seq] for seq in seqs] == [""] * len(seqs)
    return [
        [(call.name, json.loads(call.arguments)) for call in engine.seq_calls[seq]] for seq in seqs
    ]


@pytest.mark.whole
@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [8, pytest.param(50, marks=pytest.mark.whole)])
def test_required_call_answers_are_valid(load_tiny: Load, count: int):
    """Four choices each."""
    engine = EngineHarness(*load_tiny("qwen3_vl"))
    kinds = [
        tools("wait"),
        tools("click", parallel=False),
        tools("count", "type-text"),
        tools(),
        tools(parallel=False),
        tools(allowed=("count",), parallel=False),
        tools(allowed=("click", "wait"), parallel=False),
        tools("type-text", "count", "click", parallel=False),
    ]
    asked = {f"{i}": kinds[i % len(kinds)] for i in range(count)}
    for name, offered in asked.items():
        parts = [random_image(int(name) % 5), "what?"] if int(name) % 3 == 0 else ["what?"]
        submit = ask(name, *parts, sampling=sampling(int(name), n=4))
        engine.add(with_tools(submit, offered))
        engine.step(3)
    engine.run()
    called = [
        tool
        for name, offered in asked.items()
        for calls in answers(engine, name)
        for tool, _ in check_calls(calls, offered)
    ]
    assert len(engine.seq_texts) == 4 * count
    assert set(called) == set(TOOLS)


@pytest.mark.parametrize("family", few_of(["gemma3", "smolvlm", "pixtral"], ["smolvlm"]))
def test_required_calls_are_valid_in_other_vocabularies(load_tiny: Load, family: str):
    engine, offered = EngineHarness(*load_tiny(family)), tools()
    for seed in range(4):
        engine.add(with_tools(ask(f"{seed}", "what?", sampling=sampling(seed)), offered))
    engine.run()
    for seed in range(4):
        check_calls(answers(engine, f"{seed}")[0], offered)


def test_required_calls_leave_other_answers_unchanged(load_tiny: Load):
    free = ask("free", "a text", sampling=SamplingParams(max_tokens=40, temperature=1.1, seed=2))
    alone = EngineHarness(*load_tiny("qwen3_vl")).answer(free)
    engine = EngineHarness(*load_tiny("qwen3_vl"))
    engine.add(free)
    engine.add(with_tools(ask("forced", "a text", sampling=sampling(1)), tools()))
    engine.run()
    assert engine.tokens["free"] == alone


def test_unenforceable_tools_fail_only_their_request(load_tiny: Load):
    engine = EngineHarness(*load_tiny("qwen3_vl"))
    wrong = Tools('[{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}]')
    wrong = msgspec.structs.replace(wrong, choice="required")
    engine.add(with_tools(ask("wrong", "a text"), wrong))
    engine.add(with_tools(ask("right", "a text", sampling=sampling(1)), tools()))
    engine.run()
    end = engine.ends["wrong"]
    assert isinstance(end, Failed)
    assert (end.code, end.param) == ("invalid_value", "tools")
    check_calls(answers(engine, "right")[0], tools())


def test_stuck_tool_grammar_error_names_tools_field(load_tiny: Load):
    ways = {"anyOf": [{"type": "object", "properties": {f"k{i}": {}}} for i in range(700)]}
    definitions = [{"type": "function", "function": {"name": "f", "parameters": ways}}]
    engine = with_template(load_tiny("qwen3_vl")[0])
    stuck = Tools(json.dumps(definitions), "required")
    end = engine.failure(with_tools(ask("stuck", "a text", sampling=sampling(1)), stuck))
    assert (end.code, end.param) == ("invalid_value", "tools")


# ---- thoughts ------------------------------------------------------------------------


@pytest.fixture
def reasoning_engine(load_tiny: Load) -> EngineHarness:
    """A model with reasoning marks, which it never samples by chance."""
    loaded, _ = load_tiny("qwen3_5")
    return with_template(loaded, reasoning_format=THINK, tool_parser=HERMES)


def add_inside_reasoning(engine: EngineHarness, submit: Submit) -> None:
    """Add a request whose prompt ends inside reasoning."""
    made = prepare(engine.preparer, submit)
    marks = engine.preparer._marks
    grammar = engine.preparer._grammar(submit, Cancellation())
    guided = with_reasoning(marks, grammar, submit, starts=True)
    assert made.prompt.answer_format is not None
    answer_format = replace(made.prompt.answer_format, starts_in_reasoning=True)
    prompt = replace(made.prompt, grammar=guided, answer_format=answer_format)
    engine.preparers.outcomes[submit.request_id] = replace(made, prompt=prompt)
    engine.add(submit)


def raw_texts(engine: EngineHarness, request_id: str) -> list[str]:
    """The text of each choice up to its end, control tokens included."""
    host = engine.preparer._spec
    seqs = sorted(seq for seq in engine.seqs if seq.request_id == request_id)
    drawn = [[i for i in engine.seqs[seq] if i not in host.eos_token_ids] for seq in seqs]
    return [host.backend.decode(each, skip_special_tokens=False) for each in drawn]


@pytest.mark.parametrize("budget", [0, 1, 17])
def test_reasoning_budget_closes_reasoning(reasoning_engine: EngineHarness, budget: int):
    params = sampling(1, max_tokens=40, n=2, max_reasoning_tokens=budget)
    add_inside_reasoning(reasoning_engine, ask("a", "what?", sampling=params))
    reasoning_engine.run()
    end = reasoning_engine.preparer._spec.backend.token_to_id("</think>")
    for choice in range(2):
        drawn = reasoning_engine.seqs[SeqId("a", choice)]
        assert drawn.index(end) == budget
        assert drawn.count(end) == 1
        assert len(drawn) == 40


def test_required_calls_come_after_reasoning(reasoning_engine: EngineHarness):
    offered = tools(parallel=False)
    for seed in range(8):
        params = sampling(seed, n=2, max_reasoning_tokens=5 * seed)
        add_inside_reasoning(
            reasoning_engine, with_tools(ask(f"{seed}", "what?", sampling=params), offered)
        )
        reasoning_engine.step(3)
    reasoning_engine.run()
    for seed in range(8):
        for text, calls in zip(
            raw_texts(reasoning_engine, f"{seed}"),
            answers(reasoning_engine, f"{seed}"),
            strict=True,
        ):
            thought, mark, _ = text.partition("</think>")
            assert mark
            assert bool(thought) == (seed > 0)
            check_calls(calls, offered)


def test_required_answer_may_begin_with_reasoning(reasoning_engine: EngineHarness):
    bias = {reasoning_engine.preparer._spec.backend.token_to_id("<think>"): 1000.0}
    params = sampling(1, logit_bias=bias, max_reasoning_tokens=10)
    asked = with_tools(ask("a", "what?", sampling=params), tools(parallel=False))
    reasoning_engine.add(
        msgspec.structs.replace(asked, template=TemplateOptions(enable_thinking=True))
    )
    reasoning_engine.run()
    (text,) = raw_texts(reasoning_engine, "a")
    assert text.startswith("<think>")
    check_calls(answers(reasoning_engine, "a")[0], tools(parallel=False))


def test_schema_is_followed_after_reasoning(reasoning_engine: EngineHarness):
    schema = json.dumps({"enum": ["a", "b"]})
    params = sampling(3, json_schema=schema, max_reasoning_tokens=6)
    add_inside_reasoning(reasoning_engine, ask("a", "what?", sampling=params))
    reasoning_engine.run()
    (text,) = raw_texts(reasoning_engine, "a")
    assert json.loads(text.partition("</think>")[2]) in ("a", "b")


def test_reasoning_does_not_depend_on_batch(reasoning_engine: EngineHarness, load_tiny: Load):
    params = sampling(7, max_reasoning_tokens=12)
    thought = with_tools(ask("thought", "what?", sampling=params), tools("count", parallel=False))
    free = ask("free", "a text", sampling=SamplingParams(max_tokens=50, temperature=1.1, seed=2))
    alone = EngineHarness(*load_tiny("qwen3_5")).answer(free)
    add_inside_reasoning(reasoning_engine, thought)
    reasoning_engine.run()
    drawn = reasoning_engine.tokens["thought"]
    both = EngineHarness(reasoning_engine.runner._loaded, reasoning_engine.preparer)
    both.add(free)
    add_inside_reasoning(both, thought)
    both.run()
    assert both.tokens == {"free": alone, "thought": drawn}


def test_strict_arguments_conform_in_automatic_calls(reasoning_engine: EngineHarness):
    """A random model, biased to begin a call, finishes the call by its schema."""
    offered = tools("count", choice="auto", strict=("count",), parallel=False)
    backend = reasoning_engine.preparer._spec.backend
    schema = json.dumps({"const": 1})
    first = backend.encode("<tool_call>", add_special_tokens=False).ids[0]
    params = sampling(2, logit_bias={first: 1000.0}, json_schema=schema)
    reasoning_engine.add(with_tools(ask("a", "what?", sampling=params), offered))
    reasoning_engine.run()
    check_calls(answers(reasoning_engine, "a")[0], offered)
