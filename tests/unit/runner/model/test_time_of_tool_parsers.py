"""Reading calls takes time in proportion, whatever a model writes: the engine waits meanwhile."""

from __future__ import annotations

import contextlib
import time
from itertools import permutations

import pytest

from vlm_server.runner.model.tools.tool_formats import tool_format

LENGTH = 200_000
SECONDS = 2.0
"""Of CPU, for a text that takes a quadratic reader many."""
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
    found = tool_format(None, name)
    assert found is not None
    began = time.process_time()
    with contextlib.suppress(ValueError):
        found.parse(text, TOOLS)
    return time.process_time() - began


@pytest.mark.parametrize("name", TOKENS)
def test_a_long_text_takes_time_in_proportion(name: str):
    for token in [*TOKENS[name], " ", "\n", "a"]:
        many = token * (LENGTH // len(token))
        assert seconds(name, many) < SECONDS, token
        for before, after in permutations(["", *TOKENS[name][:5]], 2):
            assert seconds(name, before + many + after) < SECONDS, (before, token, after)


@pytest.mark.parametrize("name", TOKENS)
def test_texts_of_two_tokens_take_time_in_proportion(name: str):
    for first, second in permutations([*TOKENS[name], " "], 2):
        half = LENGTH // 2
        text = first * (half // len(first)) + second * (half // len(second))
        assert seconds(name, text) < SECONDS, (first, second)
        pair = first + second
        assert seconds(name, pair * (LENGTH // len(pair))) < SECONDS, pair
