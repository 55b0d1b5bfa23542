"""The tool parser of each model family: calls are complete for any split of the text."""

from __future__ import annotations

import contextlib
import json
import time
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.output.formats import Event, merged, parser, read, split_at
from vlm_server.engine.output.formats import ToolFormat, tool_format
from vlm_server.runner.loading.chat_templates import tool_parser

registered = pytest.importorskip("vlm_server.runner.loading.chat_templates")

WANTED = ("call", "look", {"x": 1, "name": "a b"})
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "name": {"type": "string"}},
        },
    },
}
ARGUMENTS = '{"x": 1, "name": "a b"}'
CALLS = {
    "json_tools": (
        '<tool_call>\n{"name": "look", "arguments": {"x": 1, "name": "a b"}}\n</tool_call>'
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=look>\n<parameter=x>\n1\n</parameter>\n"
        "<parameter=name>\na b\n</parameter>\n</function>\n</tool_call>"
    ),
    "glm47": (
        "<tool_call>look\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n"
        "<arg_key>name</arg_key>\n<arg_value>a b</arg_value>\n</tool_call>"
    ),
    "mistral": '[TOOL_CALLS]look[ARGS]{"x": 1, "name": "a b"}',
    "gemma4": '<|tool_call>call:look{x:1,name:<|"|>a b<|"|>}<tool_call|>',
    "pythonic": '<|tool_call_start|>[look(x=1, name="a b")]<|tool_call_end|>',
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="look">\n<parameter name="x">1</parameter>\n'
        '<parameter name="name">a b</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
        '<|tool_call_argument_begin|>{"x": 1, "name": "a b"}<|tool_call_end|>'
        "<|tool_calls_section_end|>"
    ),
    "cohere2_moe": (
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "look", '
        '"parameters": {"x": 1, "name": "a b"}}]<|END_ACTION|>'
    ),
    "harmony": (
        "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
        '{"x": 1, "name": "a b"}<|call|>'
    ),
    "longcat": (
        "<longcat_tool_call>look\n<longcat_arg_key>x</longcat_arg_key>"
        "<longcat_arg_value>1</longcat_arg_value><longcat_arg_key>name</longcat_arg_key>"
        "<longcat_arg_value>a b</longcat_arg_value></longcat_tool_call>"
    ),
    "minimax_m3": (
        ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="look">]<]minimax[>[<x>1'
        "]<]minimax[>[</x>]<]minimax[>[<name>a b]<]minimax[>[</name>]<]minimax[>[</invoke>"
        "]<]minimax[>[</tool_call>"
    ),
    "minicpm5": (
        '<function name="look"><param name="x">1</param><param name="name">a b</param></function>'
    ),
    "atem": (
        'to=self<|message|>Hm.<atem:function_calls>\n<atem:invoke name="look">\n'
        '<atem:parameter name="x">1</atem:parameter>\n'
        '<atem:parameter name="name">a b</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls>"
    ),
}


def format_called(name: str) -> ToolFormat:
    found = tool_format(registered.tool_parser(None, name))
    assert found is not None
    return found


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=30, deadline=None)
@given(places=st.lists(st.integers(0, 300), max_size=40))
def test_calls_of_every_format_are_equal_for_any_split(name: str, places: list[int]):
    text = f"I look.\n{CALLS[name]}\n{CALLS[name]}\n"
    answer_parser = parser(format_called(name), tools=(TOOL,))
    first, *calls = merged(read(answer_parser, split_at(text, places)))
    assert first == ("text", "I look.\n")
    assert [(kind, called, json.loads(args)) for kind, called, args in calls] == [WANTED, WANTED]


@pytest.mark.parametrize("name", CALLS)
def test_truncated_call_is_text_or_valid_call(name: str):
    """Wherever it is cut: nothing raises, and nothing is lost."""
    for length in range(1, len(CALLS[name])):
        text = CALLS[name][:length]
        answer_parser = parser(format_called(name), tools=(TOOL,))
        found = merged(read(answer_parser, [text]))
        assert found == [("text", text)] or answer_parser.calls.num_valid == 1


@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"minicpm5", "minimax_m3"}))
def test_end_mark_in_argument_is_text_for_every_format(name: str):
    """But of the two whose own syntax has no such text."""
    tools = format_called(name)
    value = f"a {tools.start} b {tools.end} c"
    text = CALLS[name].replace("a b", value)
    for pieces in ([text], list(text)):
        found = merged(read(parser(tools, tools=(TOOL,)), pieces))
        assert [(call, json.loads(args)) for _, call, args in found] == [
            ("look", {"x": 1, "name": value})
        ]


@pytest.mark.parametrize(
    "written",
    [
        'look[ARGS]{\n "x": 1,\n "name": "a b"\n}',
        '[\n{"name": "look",\n"arguments": {"x": 1, "name": "a b"}}]',
        'look[CALL_ID]abcdefghi[ARGS]{"x": 1,\n"name": "a b"}',
    ],
)
def test_mistral_json_may_contain_line_breaks(written: str):
    text = f"[TOOL_CALLS]{written}"
    for pieces in ([text, text], list(text + text)):
        found = merged(read(parser(format_called("mistral"), tools=(TOOL,)), pieces))
        assert [(kind, called, json.loads(args)) for kind, called, args in found] == [WANTED] * 2


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
            "Hello",
            [("thought", "Hm."), ("text", "Hello")],
        ),
        ("<|channel|>final<|message|>Hello", [("text", "Hello")]),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + CALLS["harmony"],
            [("thought", "Hm."), ("call", "look", '{"x": 1, "name": "a b"}')],
        ),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.look"
            f"<|channel|>commentary <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
            [("thought", "Hm."), ("call", "look", ARGUMENTS)],
        ),
        (
            f" to=functions.look<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>",
            [("call", "look", ARGUMENTS)],
        ),
        (
            f"<|channel|>analysis to=functions.look code<|message|>{ARGUMENTS}<|call|>",
            [("call", "look", ARGUMENTS)],
        ),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
            f"<|channel|>commentary to=functions.look json<|message|>{ARGUMENTS}<|call|>",
            [("text", "I look.<|end|>"), ("call", "look", ARGUMENTS)],
        ),
        (
            '<|channel|>final <|constrain|>json<|message|>{"a": 1}',
            [("text", '{"a": 1}')],
        ),
        (
            "<|channel|>final<|message|>Write to=functions.look here",
            [("text", "Write to=functions.look here")],
        ),
        (
            " to=functions.look<|channel|>commentary json<|message|>{cut",
            [("text", " to=functions.look<|channel|>commentary json<|message|>{cut")],
        ),
    ],
)
def test_harmony_headers_are_not_shown(text: str, wanted: list[Event]):
    thoughts = registered.reasoning_format("<|channel|>analysis")
    for pieces in ([text], list(text)):
        answer_parser = parser(format_called("harmony"), thoughts, tools=(TOOL,))
        assert merged(read(answer_parser, pieces)) == wanted


# ---- time ----------------------------------------------------------------------------


LENGTH = 200_000
SECONDS = 1.0
"""Of CPU: a text that takes no longer is not looked at again with a part of it."""
SHARE, SLOWER = 4, 10
"""A quarter of a text takes a quarter of the time, where a quadratic reader needs a sixteenth."""
NS = "]<]minimax[>["
TOKENS = {
    "atem": ['<atem:invoke name="f">', "<atem:invoke ", '<atem:parameter name="a">',
             '<atem:parameter name="a" ', 'name="', "</atem:parameter>", "</atem:invoke>"],
    "cohere2_moe": ['[{"tool_name": "f"', '{"a":', '"', "\\|", "]"],
    "gemma4": ["call:f{", "call:", "a:", '<|"|>', "{", "}", "[", ",", ":"],
    "glm47": ["f", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
              "<arg_key></arg_key><arg_value>", "\\n"],
    "harmony": ["functions.f ", "functions.", "<|message|>", "<|constrain|>json", "{", '{"a":'],
    "json_tools": ['{"name": "f"}', "{}", '{"a":', '"', "[", "{"],
    "kimi_k2": ["<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>", "{}",
                "<|tool_call_end|>", "{", ":0"],
    "longcat": ["f", "<longcat_arg_key>", "</longcat_arg_key>", "<longcat_arg_value>",
                "</longcat_arg_value>", "<longcat_arg_key></longcat_arg_key><longcat_arg_value>"],
    "minicpm5": [' name="f">', '<param name="a">', "</param>", "<param ", "<![CDATA[", "&amp;"],
    "minimax_m2": ['<invoke name="f">', '<parameter name="a">', "</parameter>", "</invoke>",
                   "<invoke name=", '<parameter name="'],
    "minimax_m3": [f'{NS}<invoke name="f">', f"{NS}<invoke ", f"{NS}<a>", f"{NS}</a>",
                   f"{NS}</invoke>", NS, "name='", 'name="'],
    "mistral": ["f", "f{}", "{}", "[ARGS]", "[CALL_ID]", "[TOOL_CALLS]", "[", "{", '{"a":'],
    "pythonic": ["[f(a=", "[", "]", "f(", "f(),", "a=1,", "'", "-", ".a", "f-g(", "(", "1,", "{"],
    "qwen3_coder": ["<function=f>", "<parameter=a>", "</parameter>", "</function>", "<function=",
                    "<parameter=", "<parameter=a>x</parameter>y"],
}  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "object"}, "b": {"type": "integer"}},
            },
        },
    }
    for name in ("f", "f-g")
]


def seconds(name: str, text: str) -> float:
    found = tool_format(tool_parser(None, name))
    assert found is not None
    began = time.process_time()
    with contextlib.suppress(ValueError):
        found.parse(text, TOOLS)
    return time.process_time() - began


def is_proportional(name: str, *pieces: tuple[str, int]) -> bool:
    """Whether a text of each piece, repeated, is read in time that grows with its length."""
    whole, part = (
        "".join(piece * max(times // share, 1) for piece, times in pieces) for share in (1, SHARE)
    )
    return seconds(name, whole) < SECONDS or seconds(name, whole) < SLOWER * seconds(name, part)


@pytest.mark.alone
@pytest.mark.parametrize("name", TOKENS)
def test_tool_parsers_take_linear_time_for_long_text(name: str):
    for token in [*TOKENS[name], " ", "\n", "a"]:
        many = (token, LENGTH // len(token))
        assert is_proportional(name, many), token
        for before, after in permutations(["", *TOKENS[name][:5]], 2):
            assert is_proportional(name, (before, 1), many, (after, 1)), (before, token, after)


@pytest.mark.alone
@pytest.mark.parametrize("name", TOKENS)
def test_tool_parsers_take_linear_time_for_two_repeated_tokens(name: str):
    for first, second in permutations([*TOKENS[name], " "], 2):
        halves = [(token, LENGTH // 2 // len(token)) for token in (first, second)]
        assert is_proportional(name, *halves), (first, second)
        pair = first + second
        assert is_proportional(name, (pair, LENGTH // len(pair))), pair


def test_quadratic_parser_is_detected(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(f"{__name__}.seconds", lambda name, text: (len(text) / LENGTH) ** 2 * 20)
    assert not is_proportional("mistral", ("f{}", LENGTH // 3))
