"""Reading calls takes time in proportion, whatever a model writes: the engine waits meanwhile."""

from __future__ import annotations

import contextlib
import time
from itertools import permutations

import pytest

from vlm_server.engine.output.formats import tool_format
from vlm_server.runner.loading.chat_templates import tool_parser

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
