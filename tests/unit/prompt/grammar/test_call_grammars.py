"""Grammars of tool calls accept exactly valid calls, and name the tool of a bad schema."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from tests.unit.prompt.grammar.test_grammars import New, byte_host, grammars, new
from vlm_server.errors import InvalidRequest
from vlm_server.interfaces import Grammar
from vlm_server.interfaces.model_spec import ToolParser
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.prompt.grammar.constraints import (
    AutoCalls,
    Constraint,
    Constraints,
    RequiredCalls,
    Schema,
)
from vlm_server.prompt.grammar.grammar_cache import Grammars
from vlm_server.prompt.grammar.lark import MAX_CALLS, arguments_schema
from vlm_server.protocol import SamplingParams, Submit, Tools
from vlm_server.runner.loading.chat_templates import reasoning_format

__all__ = ["grammars", "new"]

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"$ref": "#/properties/x"}},
    "required": ["x", "y"],
}
TREE = {
    "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    "properties": {"tree": {"$ref": "#/$defs/tree"}},
    "required": ["tree"],
}
HERMES = ToolParser("json_tools", "<tool_call>", "</tool_call>", lambda _text, _tools: [])
END = 256
XML = replace(HERMES, name="qwen3_coder")


def tools(
    choice: str = "required",
    allowed: tuple[str, ...] = (),
    strict: tuple[str, ...] = (),
    parallel: bool = True,
    **parameters: Any,
) -> Tools:
    listed = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in parameters.items()
    ]
    return Tools(json.dumps(listed), choice, allowed, parallel, strict)  # type: ignore[arg-type]


def constraint(
    offered: Tools | None, parser: ToolParser | None = HERMES, schema: Any = None
) -> Constraint | None:
    """The constraint of a request to a model with one token per byte."""
    host = byte_host()
    host.tool_parser = parser
    text = None if schema is None else json.dumps(schema)
    submit = Submit("a", (), (), SamplingParams(json_schema=text), tools=offered)
    return Constraints(host).constraint_on(submit)


def compiled(
    grammars: Grammars, constraint_of_request: Constraint | None, salt: str = ""
) -> Grammar:
    assert constraint_of_request is not None
    return grammars.compile(constraint_of_request, salt, Cancellation())


def takes(grammar: Grammar, text: str, host: Any = None) -> bool:
    """Whether the grammar accepts `text` as a complete answer."""
    (matcher,) = grammar.begin(1)
    for token_id in [*(host or byte_host()).backend.encode(text).ids, END]:
        assert matcher.wait(30)
        if not matcher.allowed()[token_id]:
            matcher.close()
            return False
        matcher.advance([token_id])
    matcher.close()
    return True


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def refusal(grammars: Grammars, constraint_of_request: Constraint | None) -> str:
    with pytest.raises(InvalidRequest) as caught:
        compiled(grammars, constraint_of_request)
    assert caught.value.param == "tools"
    assert caught.value.message.isprintable()
    return caught.value.message


# ---- forced calls --------------------------------------------------------------------


def test_required_calls_grammar_accepts_only_calls_of_tools(grammars: Grammars):
    grammar = compiled(grammars, constraint(tools(point=POINT, tree=TREE)))
    for answer in (
        [call("point", x=1, y=-2)],
        [call("tree", tree=[[], [[]]]), call("point", x=0, y=0)],
        [call("tree", tree=[])] * MAX_CALLS,
    ):
        assert takes(grammar, json.dumps(answer)), answer
    for wrong in (
        [],
        {},
        call("point", x=1, y=1),
        [call("point", x=1)],
        [call("point", x=1, y="a")],
        [call("point", x=1, y=1, z=1)],
        [call("tree", x=1, y=1)],
        [call("other")],
        [call("tree", tree=[5])],
        [{"name": "point"}],
        [call("tree", tree=[])] * (MAX_CALLS + 1),
    ):
        assert not takes(grammar, json.dumps(wrong)), wrong


def test_required_calls_without_parallel_allow_one_call(grammars: Grammars):
    grammar = compiled(grammars, constraint(tools(parallel=False, tree=TREE)))
    assert takes(grammar, json.dumps([call("tree", tree=[])]))
    assert not takes(grammar, json.dumps([call("tree", tree=[])] * 2))


def test_required_calls_are_limited_to_allowed_tools(grammars: Grammars):
    grammar = compiled(grammars, constraint(tools(allowed=("tree",), point=POINT, tree=TREE)))
    assert takes(grammar, json.dumps([call("tree", tree=[])]))
    assert not takes(grammar, json.dumps([call("point", x=1, y=1)]))


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}])
def test_tool_without_parameters_accepts_no_arguments(grammars: Grammars, parameters: Any):
    grammar = compiled(grammars, constraint(tools(now=parameters)))
    assert takes(grammar, '[{"name": "now", "arguments": {}}]')
    assert not takes(grammar, '[{"name": "now", "arguments": {"a": 1}}]')


@pytest.mark.parametrize(
    ("parameters", "arguments", "is_taken"),
    [
        ({"properties": {"a": {}}}, {"a": [None]}, True),
        ({"properties": {"a": {}}}, [], False),
        ({"properties": {"a": True}}, {"a": 1}, True),
        ({"properties": {"a": False}}, {"a": 1}, False),
        ({"properties": {"a": False}}, {}, True),
        ({"type": ["object", "null"], "properties": {}}, {}, True),
        ({"type": ["object", "null"], "properties": {}}, None, False),
        ({"type": "object"}, {"what": "ever"}, True),
        ({"properties": {}, "additionalProperties": True}, {"what": "ever"}, True),
        ({"properties": {}, "additionalProperties": {"type": "null"}}, {"a": 1}, False),
        ({"properties": {}, "required": ["a"]}, {"a": 1}, True),
        ({"$ref": "#/$defs/p", "$defs": {"p": {"required": ["a"]}}}, {}, False),
        ({"$defs": {"p": TREE["$defs"]}, "anyOf": [{"required": ["a"]}]}, {"a": 1}, True),  # type: ignore[index]
        ({"x-guidance": {"whitespace_flexible": True}, **POINT}, {"x": 1, "y": 2}, True),
        ({"description": 'a "b"\\\n/é', "properties": {'"\n\\/é': {}}}, {'"\n\\/é': 1}, True),
    ],
)
def test_call_grammar_follows_parameter_schema(
    grammars: Grammars, parameters: Any, arguments: Any, is_taken: bool
):
    grammar = compiled(grammars, constraint(tools(f=parameters)))
    text = json.dumps([{"name": "f", "arguments": arguments}], ensure_ascii=False)
    assert takes(grammar, text) == is_taken


def test_call_arguments_follow_schema_order_without_extra_blanks(grammars: Grammars):
    schema = {**POINT, "properties": {"y": {}, "x": {}}, "x-guidance": {"lenient": True}}
    grammar = compiled(grammars, constraint(tools(f=schema)))
    assert takes(grammar, json.dumps([call("f", y=1, x=1)]))
    assert not takes(grammar, json.dumps([call("f", x=1, y=1)]))
    assert not takes(grammar, json.dumps([call("f", y=1, x=1)], indent=1))


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"type": "string"}, "not of the type `object`"),
        ({"properties": {"a": {"type": "text"}}}, "Invalid type"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "none"),
        ({"properties": {"a": {"$ref": "http://127.0.0.1/schema.json"}}}, "retriev"),
        ({"properties": {"a": {"enum": [2**53 + 1]}}}, "more than 53 bits"),
        ({"properties": {"a": {"uniqueItems": True}}}, "uniqueItems"),
        (False, "not the schema of an object"),
    ],
)
def test_invalid_parameter_schema_is_named_by_tool(
    grammars: Grammars, parameters: Any, reason: str
):
    for _ in range(2):
        message = refusal(grammars, constraint(tools(right=POINT, wrong=parameters)))
        assert "`wrong`" in message
        assert reason in message
    allowed = tools(allowed=("right",), right=POINT, wrong=parameters)
    assert takes(compiled(grammars, constraint(allowed)), json.dumps([call("right", x=1, y=1)]))


def test_call_grammar_of_hundred_tools_is_compiled_once(new: New, monkeypatch: pytest.MonkeyPatch):
    offered = {f"tool_{i}": POINT | {"description": f"{i}" * 300} for i in range(100)}
    grammars, compilations = new(), []
    real = grammars._server.compile
    monkeypatch.setattr(
        grammars._server, "compile", lambda *given: compilations.append(given) or real(*given)
    )
    first = compiled(grammars, constraint(tools(**offered)), "mine")
    assert compiled(grammars, constraint(tools(**offered)), "mine") is first
    assert len(compilations) == 1
    assert compiled(grammars, constraint(tools(**offered)), "yours") is not first
    assert takes(first, json.dumps([call("tool_99", x=1, y=1), call("tool_0", x=1, y=1)]))


@pytest.mark.parametrize("strict", [False, True])
def test_expensive_pattern_among_many_tools_is_refused(new: New, strict: bool):
    """The schema is refused on compilation, before a long prompt is prefilled in vain."""
    pattern = {"type": "string", "pattern": "^(a{1000}){1000}$"}
    wrong = {"type": "object", "properties": {"a": pattern}, "required": ["a"]}
    grammars = new(memory_bytes=64 << 20)
    offered = dict.fromkeys((f"tool_{i}" for i in range(20)), POINT) | {"wrong": wrong}
    names = tuple(offered) if strict else ()
    constraint_of_request = constraint(
        tools("auto" if strict else "required", strict=names, **offered)
    )
    assert "too much memory" in refusal(grammars, constraint_of_request)
    held = tuple(name for name in offered if name != "wrong")
    assert compiled(grammars, constraint(tools(allowed=held, **offered)))


NAMES = st.sampled_from(["a", "b", "$defs", "x/y", "~", "é", "a b"])
LEAVES = st.sampled_from(
    [{"type": "null"}, {"type": "boolean"}, {"enum": [1, "é"]}, {"const": "x"}]
)


@st.composite
def referring(draw: st.DrawFn) -> Any:
    """Parameters whose properties refer to definitions, each of which may refer to earlier ones."""
    definitions: dict[str, Any] = {}
    for name in draw(st.lists(NAMES, min_size=1, max_size=4, unique=True)):
        refer = [{"$ref": "#/$defs/" + pointer(definition)} for definition in definitions]
        item = draw(st.sampled_from(refer) if refer and draw(st.booleans()) else LEAVES)
        definitions[name] = draw(
            st.sampled_from([item, {"type": "array", "items": item, "maxItems": 2}])
        )
    properties = {
        name: {"$ref": "#/$defs/" + pointer(draw(st.sampled_from(sorted(definitions))))}
        for name in draw(st.lists(NAMES, max_size=3, unique=True))
    }
    return {"$defs": definitions, "properties": properties, "required": list(properties)}


def pointer(name: str) -> str:
    """`name` escaped for a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1").replace(" ", "%20").replace("é", "%C3%A9")


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(listed=st.lists(referring(), min_size=1, max_size=3), seed=st.integers(0, 2**32))
def test_schema_references_resolve_within_their_tool(
    grammars: Grammars, listed: list[Any], seed: int
):
    offered = tools(**{f"t{i}": schema for i, schema in enumerate(listed)})
    text = random_answer(compiled(grammars, constraint(offered)), np.random.default_rng(seed))
    for tool_call in json.loads(text):
        parameters = listed[int(tool_call["name"][1:])]
        jsonschema.validate(tool_call["arguments"], arguments_schema(parameters))


def random_answer(grammar: Grammar, rng: np.random.Generator) -> str:
    (matcher,) = grammar.begin(1)
    sampled: list[int] = []
    while not sampled or sampled[-1] != END:
        assert matcher.wait(30)
        sampled.append(int(rng.choice(np.flatnonzero(matcher.allowed()))))
        matcher.advance([sampled[-1]])
    matcher.close()
    return str(byte_host().backend.decode(sampled[:-1]))


# ---- calls that the model makes freely -----------------------------------------------


@pytest.mark.parametrize(
    ("answer", "is_taken"),
    [
        ("", True),
        ("Just a text.", True),
        ('So:\n<tool_call>\n{"name": "point", "arguments": {"x": 1, "y": 2}}\n</tool_call>', True),
        (
            '<tool_call>{"name": "any", "arguments": {"z": []}}</tool_call>\n'
            '<tool_call>\n{"name": "point", "arguments": {"x": 1, "y": 2}}\n</tool_call> Done. <b>',
            True,
        ),
        ('<tool_call>\n{"name": "point", "arguments": {"x": 1}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "none", "arguments": {"x": 1}}\n</tool_call>', False),
        ('<tool_call>{"name": "any", "arguments": []}</tool_call>', False),
        ("<tool_call>", False),
        ("A <tool_call> is what I write.", False),
    ],
)
def test_auto_calls_of_strict_tools_follow_schema(grammars: Grammars, answer: str, is_taken: bool):
    offered = tools("auto", strict=("point",), point=POINT, any={"properties": {}})
    assert takes(compiled(grammars, constraint(offered)), answer) == is_taken


def test_text_around_strict_calls_allows_no_control_tokens(new: New):
    host = byte_host()
    host.backend.add_special_tokens(["<box>"])
    host.vocabulary_size, host.tool_parser = 258, HERMES
    offered = tools("auto", strict=("now",), now={})
    constraint_of_request = Constraints(host).constraint_on(
        Submit("a", (), (), SamplingParams(), tools=offered)
    )
    (matcher,) = compiled(new(host=host), constraint_of_request).begin(1)
    assert matcher.allowed()[END]
    assert not matcher.allowed()[257]


def test_strict_calls_without_parallel_allow_one_call(grammars: Grammars):
    offered = tools("auto", strict=("now",), parallel=False, now={})
    grammar = compiled(grammars, constraint(offered))
    one = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert takes(grammar, f"Well, {one} then")
    assert not takes(grammar, one + one)


@pytest.mark.parametrize("is_special", [True, False])
def test_tool_call_marks_may_be_added_tokens(new: New, is_special: bool):
    """Qwen's marks act as control tokens, although its tokenizer does not flag them as special."""
    host = byte_host()
    marks = [AddedToken(mark, special=is_special) for mark in ("<call>", "</call>")]
    host.backend.add_tokens(marks)
    host.vocabulary_size, host.tool_parser = 259, replace(HERMES, start="<call>", end="</call>")
    offered = tools("auto", strict=("now",), now={})
    constraint_of_request = Constraints(host).constraint_on(
        Submit("a", (), (), SamplingParams(), tools=offered)
    )
    assert isinstance(constraint_of_request, AutoCalls)
    assert (constraint_of_request.syntax.start, constraint_of_request.syntax.end) == (
        (257,),
        (258,),
    )
    grammars = new(host=host)
    grammar = compiled(grammars, constraint_of_request)
    assert takes(grammar, 'Hm.<call>{"name": "now", "arguments": {}}</call>.', host)
    assert not takes(grammar, "<call>Hm.", host)
    assert takes(grammar, "<call", host)
    assert not takes(grammar, "<call>Hm.", byte_host()), "not even spelled out"


@pytest.mark.parametrize(
    ("answer", "is_taken"),
    [
        ('{"a": 1}', True),
        ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', True),
        ("Text.", False),
        ('{"a": 1}<tool_call>', False),
        ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>{"a": 1}', False),
        ("<tool_call>\n", False),
    ],
)
def test_answer_with_schema_and_tools_is_json_or_calls(
    grammars: Grammars, answer: str, is_taken: bool
):
    schema = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema |= {"type": "object", "additionalProperties": False}
    grammar = compiled(grammars, constraint(tools("auto", now={}), HERMES, schema))
    assert takes(grammar, answer) == is_taken


@pytest.mark.parametrize(("end", "more"), [("</tool_call>", "x"), ("", None)])
def test_answer_schema_leaves_xml_calls_unconstrained(
    grammars: Grammars, end: str, more: str | None
):
    constraint_of_request = constraint(
        tools("auto", now={}), replace(XML, end=end), {"type": "integer"}
    )
    grammar = compiled(grammars, constraint_of_request)
    assert takes(grammar, "5")
    assert takes(grammar, "<tool_call>\n<function=now>\n</function>\n" + end)
    assert more is None or not takes(grammar, "<tool_call><function=now>" + end + more)


def test_invalid_answer_schema_with_tools_is_refused(grammars: Grammars):
    constraint_of_request = constraint(tools("auto", now={}), HERMES, {"type": "text"})
    assert "Invalid type" in refusal(grammars, constraint_of_request)


# ---- constraints by request ----------------------------------------------------------


def test_constraint_depends_on_tools_parser_and_schema():
    free, forced = tools("auto", now={}), tools(now={})
    assert constraint(None) is None
    assert constraint(free) is None
    assert constraint(forced, None) == RequiredCalls(forced)
    assert constraint(None, HERMES, {}) == Schema("{}")
    assert constraint(free, None, {}) == Schema("{}"), "this model calls nothing"
    assert constraint(tools("auto", strict=("now",), now={}), None) is None


@pytest.mark.parametrize(
    ("offered", "parser", "schema", "param"),
    [
        (tools(now={}), HERMES, {}, "response_format"),
        (tools("auto", strict=("now",), now={}), XML, None, "tools"),
    ],
)
def test_unsupported_constraint_is_refused_with_param(
    offered: Tools, parser: ToolParser, schema: Any, param: str
):
    with pytest.raises(InvalidRequest) as caught:
        constraint(offered, parser, schema)
    assert caught.value.param == param


@pytest.mark.parametrize("field", [{"min_tokens": 1}, {"ignore_eos": True}])
@pytest.mark.parametrize("offered", [tools(now={}), tools("auto", strict=("now",), now={})])
def test_constrained_calls_refuse_min_tokens_and_ignore_eos(field: dict[str, Any], offered: Tools):
    host = byte_host()
    host.tool_parser = HERMES
    with pytest.raises(InvalidRequest) as caught:
        Constraints(host).constraint_on(Submit("a", (), (), SamplingParams(**field), tools=offered))
    assert caught.value.param in field
    free = Submit("a", (), (), SamplingParams(**field), tools=tools("auto", now={}))
    assert Constraints(host).constraint_on(free) is None


# ---- answers in channels -------------------------------------------------------------

FINAL, CALL = "<|channel|>final<|message|>", "<|channel|>commentary to=functions.f"


def channel_host() -> Any:
    """A model with one token per byte, and harmony's control tokens."""
    host = byte_host()
    marks = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>"]
    host.backend.add_special_tokens(marks)
    host.vocabulary_size = host.backend.get_vocab_size()
    host.reasoning_format = reasoning_format("<|channel|>analysis")
    host.tool_parser = ToolParser(
        "harmony", "<|channel|>commentary to=", "<|call|>", lambda _text, _tools: []
    )
    return host


@pytest.mark.parametrize(
    ("offered", "taken", "wrong"),
    [
        (None, ['{"a": 1}'], ['{"a": "b"}', f'{{"a": {"1" * 30}}}', f'{FINAL}{{"a": 1}}']),
        (
            tools(f={}),
            ['[{"name": "f", "arguments": {}}]'],
            ['{"a": 1}', '[{"name": "g", "arguments": {}}]'],
        ),
        (tools("auto", f={}), ['{"a": 1}'], ['[{"name": "f", "arguments": {}}]']),
    ],
)
def test_grammar_holds_behind_header_of_channel(
    new: New, offered: Tools | None, taken: list[str], wrong: list[str]
):
    host = channel_host()
    has_schema = offered is None or offered.choice == "auto"
    schema = {"properties": {"a": {"type": "integer"}}, "required": ["a"], "type": "object"}
    schema |= {"additionalProperties": False}
    sampling = SamplingParams(json_schema=json.dumps(schema) if has_schema else None)
    submit = Submit("a", (), (), sampling, tools=offered)
    grammar = compiled(new(host=host), Constraints(host).constraint_on(submit))
    for text in taken:
        assert takes(grammar, FINAL + text, host), text
        assert not takes(grammar, text, host), text
        assert not takes(grammar, f"<|channel|>commentary<|message|>{text}", host), text
    for text in wrong:
        assert not takes(grammar, FINAL + text, host), text
    is_callable = offered is not None and offered.choice == "auto"
    assert takes(grammar, f"{CALL}<|message|>{{}}<|call|>", host) == is_callable
