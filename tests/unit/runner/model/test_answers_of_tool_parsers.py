"""mlx-vlm's parsers behind the engine's: each model's calls come whole, however they are split."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.request.output.formats import merged, parser, read, split_at
from vlm_server.host_model import ToolFormat

load_tool_module = pytest.importorskip("mlx_vlm.tools").load_tool_module

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
}


def tool_format(name: str) -> ToolFormat:
    module = load_tool_module(name)

    def parse(body: str, tools: Sequence[Mapping[str, Any]]) -> Sequence[tuple[str, str]]:
        read = module.parse_tool_call(body.strip(), list(tools))
        calls = read if isinstance(read, list) else [read]
        return [(call["name"], _as_json(call["arguments"])) for call in calls]

    return ToolFormat(name, module.tool_call_start, module.tool_call_end, parse)


def _as_json(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=30, deadline=None)
@given(places=st.lists(st.integers(0, 300), max_size=40))
def test_any_split_gives_the_call(name: str, places: list[int]):
    text = f"I look.\n{CALLS[name]}\n{CALLS[name]}\n"
    made = parser(tool_format(name), tools=(TOOL,))
    first, *calls = merged(read(made, split_at(text, places)))
    assert first == ("text", "I look.\n")
    assert [(kind, called, json.loads(args)) for kind, called, args in calls] == [WANTED, WANTED]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_cut_short_is_text_or_a_call(name: str):
    """Wherever it is cut: nothing raises, and nothing is lost."""
    for length in range(1, len(CALLS[name])):
        text = CALLS[name][:length]
        made = parser(tool_format(name), tools=(TOOL,))
        found = merged(read(made, [text]))
        assert found == [("text", text)] or made.calls.num_valid == 1
