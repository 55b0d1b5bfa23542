"""Tool formats of models: complete calls are parsed, and incomplete ones raise."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vlm_server.engine.output.formats import tool_format
from vlm_server.errors import ModelLoadError
from vlm_server.runner.loading.chat_templates import reasoning_format, tool_parser

PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "on": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "place": {"$ref": "#/$defs/place"},
    "maybe": {"type": ["string", "null"]},
    "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "side": {"enum": ["left", "right", "1"]},
    "anything": {},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": PROPERTIES,
                "$defs": {"place": {"type": "object", "properties": {"x": {"type": "integer"}}}},
            },
        },
    }
    for name in ("look", "get-page.now", "wait", "functions.a")
]


def read(name: str, text: str) -> list[tuple[str, Any]]:
    found = tool_format(tool_parser(None, name))
    assert found is not None
    return [(called, json.loads(arguments)) for called, arguments in found.parse(text, TOOLS)]


LOOK = [("look", {"text": "a, b", "count": 2})]
TWO = [*LOOK, ("get-page.now", {})]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("json_tools", '\n{"name": "look", "arguments": {"text": "a, b", "count": 2}}\n', LOOK),
        ("json_tools", '{"name": "look", "parameters": {"text": "a, b", "count": 2}}', LOOK),
        (
            "json_tools",
            r'{"name": "look", "arguments": "{\"text\": \"a, b\", \"count\": 2}"}',
            LOOK,
        ),
        ("json_tools", '{"name": "wait"}', [("wait", {})]),
        ("json_tools", '{"name": "wait", "arguments": null}', [("wait", {})]),
        (
            "json_tools",
            '{"name": "look", "arguments": {"text": "a, b", "count": 2}}\n{"name": "get-page.now"}',
            TWO,
        ),
        (
            "qwen3_coder",
            "\n<function=look>\n<parameter=text>\na, b\n</parameter>\n<parameter=count>\n2\n"
            "</parameter>\n</function>\n",
            LOOK,
        ),
        (
            "qwen3_coder",
            "<function=look>\n<parameter=text>\na, b\n</parameter>\n<parameter=count>\n2\n"
            "</function>\n<function=get-page.now>\n</function>",
            TWO,
        ),
        (
            "qwen3_coder",
            "<function=look>\n<parameter=text>\n</parameter> <parameter=x>\n\n</parameter>\n"
            "</function>",
            [("look", {"text": "", "x": ""})],
        ),
        (
            "glm47",
            "look\n<arg_key>text</arg_key>\n<arg_value>a, b</arg_value>\n<arg_key>count</arg_key>"
            "<arg_value>2</arg_value>\n",
            LOOK,
        ),
        ("glm47", "wait\n", [("wait", {})]),
        ("glm47", '{"name": "wait", "arguments": {}}', [("wait", {})]),
        (
            "longcat",
            "look\n<longcat_arg_key>text</longcat_arg_key>\n<longcat_arg_value>a, b"
            "</longcat_arg_value>\n<longcat_arg_key>count</longcat_arg_key>\n"
            "<longcat_arg_value>2</longcat_arg_value>",
            LOOK,
        ),
        (
            "minimax_m2",
            '\n<invoke name="look">\n<parameter name="text">a, b</parameter>\n'
            '<parameter name="count">2</parameter>\n</invoke>\n<invoke name="get-page.now">\n'
            "</invoke>\n",
            TWO,
        ),
        ("mistral", 'look[ARGS]{"text": "a, b", "count": 2}', LOOK),
        ("mistral", 'look[CALL_ID]a1b2c3d4e[ARGS]{"text": "a, b", "count": 2}', LOOK),
        ("mistral", 'look{"text": "a, b", "count": 2}', LOOK),
        (
            "mistral",
            'look[ARGS]{"text": "a, b", "count": 2}[TOOL_CALLS]get-page.now[ARGS]{}',
            TWO,
        ),
        (
            "mistral",
            ' [{"name": "look", "arguments": {"text": "a, b", "count": 2}}, '
            '{"name": "get-page.now", "arguments": {}}]',
            TWO,
        ),
        ("gemma4", 'call:look{text:<|"|>a, b<|"|>,count:2}', LOOK),
        ("gemma4", 'call:look{<|"|>text<|"|>:"a, b", "count": 2}call:get-page.now{}', TWO),
        ("gemma4", 'look{text:<|"|>} {,:<|"|>}', [("look", {"text": "} {,:"})]),
        (
            "gemma4",
            'call:look{tags:[<|"|>a}<|"|>,<|"|>]<|"|>],place:{x:1},on:true,ratio:-0.5}',
            [("look", {"tags": ["a}", "]"], "place": {"x": 1}, "on": True, "ratio": -0.5})],
        ),
        ("pythonic", '[look(text="a, b", count=2)]', LOOK),
        ("pythonic", "[look(text='a, b', count=2), get-page.now()]", TWO),
        ("pythonic", "[look(on=true, maybe=null)]", [("look", {"on": True, "maybe": None})]),
        (
            "kimi_k2",
            '<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"text": "a, b", '
            '"count": 2}<|tool_call_end|><|tool_call_begin|>functions.get-page.now:1'
            "<|tool_call_argument_begin|>{}<|tool_call_end|>",
            TWO,
        ),
        (
            "kimi_k2",
            "<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
            '{"text": "<|tool_call_end|>"}<|tool_call_end|>',
            [("look", {"text": "<|tool_call_end|>"})],
        ),
        *(
            (
                "kimi_k2",
                f"<|tool_call_begin|>{written}:0<|tool_call_argument_begin|>{{}}<|tool_call_end|>",
                [("functions.a", {})],
            )
            for written in ("functions.a", "functions.functions.a")
        ),
        ("harmony", "functions.a<|message|>{}", [("functions.a", {})]),
        (
            "harmony",
            'functions.look <|constrain|>json<|message|>{"text": "a, b", "count": 2}',
            LOOK,
        ),
        (
            "qwen3_coder",
            "<function=look>\n<parameter=text>\n</parameter> in <parameter=x> and </function>\n"
            "</parameter>\n</function>",
            [("look", {"text": "</parameter> in <parameter=x> and </function>"})],
        ),
        ("mistral", 'look[ARGS]{"text": "[TOOL_CALLS]"}', [("look", {"text": "[TOOL_CALLS]"})]),
        (
            "mistral",
            '[{"name": "look", "arguments": {"text": "[TOOL_CALLS]"}}]',
            [("look", {"text": "[TOOL_CALLS]"})],
        ),
        (
            "cohere2_moe",
            '[{"tool_call_id": "0", "tool_name": "look", "parameters": {"text": "a\\\\|b"}}]',
            [("look", {"text": "a\\|b"})],
        ),
        (
            "cohere2_moe",
            '[{"tool_name": "look", "parameters": {"text": "a\\|b"}}]',
            [("look", {"text": "a|b"})],
        ),
        (
            "minicpm5",
            ' name="look"><param name="text">a, b</param><param name="count">2</param>',
            LOOK,
        ),
        (
            "minimax_m3",
            ']<]minimax[>[<invoke name="look">]<]minimax[>[<text>a, b]<]minimax[>[</text>'
            "]<]minimax[>[<count>2]<]minimax[>[</count>]<]minimax[>[</invoke>",
            LOOK,
        ),
        (
            "atem",
            '<atem:invoke name="look"><atem:parameter name="text">a, b</atem:parameter>'
            '<atem:parameter name="count">2</atem:parameter></atem:invoke>',
            LOOK,
        ),
    ],
)
def test_valid_calls_of_every_format_are_read(
    name: str, text: str, expected: list[tuple[str, Any]]
):
    assert read(name, text) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("json_tools", ""),
        ("json_tools", '{"name": "look", "arguments": {"text": "a'),
        ("json_tools", '{"name": "look", "arguments": [1]}'),
        ("json_tools", '{"name": "look", "arguments": "no JSON"}'),
        ("json_tools", '{"name": "look", "arguments": {"ratio": NaN}}'),
        ("json_tools", r'{"name": "look", "arguments": {"text": "\ud800"}}'),
        ("json_tools", '{"name": 1, "arguments": {}}'),
        ("json_tools", '{"name": " "}'),
        ("json_tools", "[]"),
        ("json_tools", '{"name": "wait"} and more'),
        ("json_tools", "[" * 100_000),
        ("qwen3_coder", "<function=look>\n<parameter=text>\na"),
        ("qwen3_coder", "<function=look>\ntext\n</function>"),
        ("qwen3_coder", "words"),
        (
            "qwen3_coder",
            "<function=look><parameter=text>a</parameter><parameter=text>b</parameter></function>",
        ),
        ("glm47", "I would look at it"),
        ("glm47", "look\n<arg_key>text</arg_key>\n<arg_value>a"),
        ("longcat", "words of any kind"),
        ("minimax_m2", '<invoke name="look"></invoke><invoke name="wait">'),
        ("mistral", "look[ARGS]"),
        ("mistral", 'look[ARGS]{"text": "a'),
        ("mistral", 'look[ARGS]{"text": "a"} and more'),
        ("mistral", "words"),
        ("gemma4", "call:look{count:1"),
        ("gemma4", 'call:look{text:<|"|>a}'),
        ("gemma4", "call:look{} and more"),
        ("gemma4", "call:look" + "{a:" * 200 + "}" * 200),
        ("pythonic", "[look(1)]"),
        ("pythonic", "[look(text=open('x'))]"),
        ("pythonic", "[look(tags={1, 2})]"),
        ("pythonic", "[]"),
        ("pythonic", "[" * 10_000),
        (
            "kimi_k2",
            "<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_call_begin|>functions.wait:1<|tool_call_argument_begin|>{",
        ),
        ("harmony", 'functions.look<|message|>{"text": '),
    ],
)
def test_text_without_whole_call_raises(name: str, text: str):
    with pytest.raises(ValueError, match="no tool call"):
        read(name, text)


@pytest.mark.parametrize("name", ["qwen3_coder", "minimax_m2", "glm47"])
@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("text", "5", "5"),
        ("text", "null", "null"),
        ("text", '"a"', '"a"'),
        ("count", "5", 5),
        ("count", "5.0", 5),
        ("count", "many", "many"),
        ("ratio", "5", 5),
        ("ratio", "0.5", 0.5),
        ("on", "True", True),
        ("on", "perhaps", "perhaps"),
        ("tags", '["a", "b"]', ["a", "b"]),
        ("tags", "['a', 'b']", ["a", "b"]),
        ("place", '{"x": 1}', {"x": 1}),
        ("maybe", "null", None),
        ("maybe", "some words", "some words"),
        ("maybe", "5", "5"),
        ("either", "5", 5),
        ("either", "null", None),
        ("side", "1", "1"),
        ("anything", "5", 5),
        ("anything", "None", "None"),
        ("anything", "a\nb", "a\nb"),
        ("unheard of", "true", True),
    ],
)
def test_arguments_between_tags_have_types_of_schema(name: str, key: str, text: str, expected: Any):
    written = {
        "qwen3_coder": f"<function=look>\n<parameter={key}>\n{text}\n</parameter>\n</function>",
        "minimax_m2": f'<invoke name="look"><parameter name="{key}">{text}</parameter></invoke>',
        "glm47": f"look\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>",
    }[name]
    ((_, arguments),) = read(name, written)
    assert arguments == {key: expected}
    assert type(arguments[key]) is type(expected)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>{{ tool_call.name }}</tool_call>", "json_tools"),
        ('<tool_call>{"name": "{{ f.name }}"}</tool_call>', "json_tools"),
        ("<tool_call>\\n<function={{ tool_call.name }}>", "qwen3_coder"),
        ("[TOOL_CALLS]{{ call.function.name }}[ARGS]", "mistral"),
        ("<|tool_call>call:{{ name }}", "gemma4"),
        ("<tool_call>{{ tool_call.name }}<arg_key>", "glm47"),
    ],
)
def test_tool_format_is_recognized_by_template(template: str, name: str):
    found = tool_parser(template, "auto")
    assert found is not None
    assert (found.name, found.needs_instruction) == (name, False)


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", None])
def test_tool_format_without_template_needs_instruction(template: str | None):
    found = tool_parser(template, "auto")
    assert found is not None
    assert (found.name, found.needs_instruction) == ("json_tools", True)


def test_tool_parser_setting_overrides_template_and_is_validated():
    template = "<tool_call>{{ tool_call.name }}</tool_call>"
    found = tool_parser(template, "mistral")
    assert found is not None
    assert (found.name, found.start, found.end) == ("mistral", "[TOOL_CALLS]", "")
    assert tool_parser(template, "off") is None
    with pytest.raises(
        ModelLoadError, match=r"model\.tool_parser: there is no 'hermes'.*qwen3_cod"
    ):
        tool_parser(template, "hermes")


@pytest.mark.parametrize(
    ("template", "start"),
    [
        ("{{ '<think>\\n' }}", "<think>"),
        ("{{ content.split('</think>')[-1] }}", "<think>"),
        ("{{ '<|channel>thought\\n<channel|>' }}", "<|channel>thought"),
        ("[THINK]{{ x }}[/THINK]", "[THINK]"),
        ("<|channel|>analysis<|message|>", "<|channel|>analysis<|message|>"),
        ("{{ messages[0].content }}<|end|>", None),
        (None, None),
    ],
)
def test_reasoning_marks_are_recognized_by_template(template: str | None, start: str | None):
    found = reasoning_format(template)
    assert (found and found.start) == start
