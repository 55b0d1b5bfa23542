"""How a model writes tool calls and thoughts, as its chat template tells.

Marks and most parsers are mlx-vlm's; where those are wrong, `call_parsers.py` has ours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_vlm.tools.registry import SPECS, _infer_tool_parser, load_tool_module

from vlm_server.errors import ModelLoadError
from vlm_server.host_model import ParseCalls, ReasoningFormat, ToolFormat
from vlm_server.runner.model.tools import call_parsers, gemma_calls, tagged_calls

AUTO, NONE = "auto", "none"
_Parse = Callable[[str, Sequence[Mapping[str, Any]]], Any]
_OURS: dict[str, _Parse] = {
    "atem": tagged_calls.atem,
    "cohere2_moe": call_parsers.cohere2_moe,
    "gemma4": lambda text, _: gemma_calls.parse(text),
    "glm47": call_parsers.glm47,
    "harmony": call_parsers.harmony,
    "json_tools": call_parsers.json_tools,
    "kimi_k2": call_parsers.kimi_k2,
    "longcat": call_parsers.longcat,
    "minimax_m2": tagged_calls.minimax_m2,
    "mistral": call_parsers.mistral,
    "pythonic": call_parsers.pythonic,
    "qwen3_coder": tagged_calls.qwen3_coder,
}
_JSON = frozenset({"cohere2_moe", "harmony", "json_tools", "kimi_k2", "mistral"})
_BRACKETS: dict[str, tuple[str, ...]] = {
    "atem": ("<atem:invoke", "</atem:invoke>"),
    "gemma4": ("{", "}"),
    "glm47": ("<arg_key>", "</arg_value>"),
    "longcat": ("<longcat_arg_key>", "</longcat_arg_value>"),
    "minicpm5": ("<param", "</param>"),
    "minimax_m2": ("<invoke", "</invoke>"),
    "minimax_m3": ("<invoke", "</invoke>"),
    "pythonic": ("(", ")", "]"),
    "qwen3_coder": ("<function=", "</function>"),
}
_JSON_CALL = re.compile(r"<tool_call>.*\"name\\?\"", re.DOTALL)
"""In templates like Qwen's, whatever they call their variables."""
_INVOKE = re.compile(r"\]<\]minimax\[>\[<(?P<closes>/?)invoke\b")
_THOUGHTS = {
    ("<|channel>", "<channel|>"): ReasoningFormat("<|channel>thought", "<channel|>"),
    ("<|channel|>analysis",): ReasoningFormat(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        headers=(
            "<|start|>assistant",
            "<|channel|>final<|message|>",
            "<|channel|>commentary<|message|>",
        ),
    ),
    ("<|START_THINKING|>",): ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<mm:think>",): ReasoningFormat("<mm:think>", "</mm:think>"),
    ("<seed:think>",): ReasoningFormat("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"): ReasoningFormat("[THINK]", "[/THINK]"),
    ("\u25c1/think\u25b7",): ReasoningFormat("\u25c1think\u25b7", "\u25c1/think\u25b7"),
    ("<think>", "</think>"): ReasoningFormat("<think>", "</think>"),
}
"""What tells a family's templates, any of these, to the marks of its thoughts."""


def tool_format(template: str | None, parser: str) -> ToolFormat | None:
    """The format of a model with this chat template; None if it has none.

    `parser` is `settings.Model.tool_parser`. Raises ModelLoadError for one that there is not.
    """
    if parser == NONE:
        return None
    names = sorted(spec.name for spec in SPECS)
    if parser != AUTO and parser not in names:
        raise ModelLoadError(
            f"model.tool_parser: there is no {parser!r}, only {', '.join([AUTO, NONE, *names])}"
        )
    name = _infer_tool_parser(template, None if parser == AUTO else parser)
    if name is None and _JSON_CALL.search(template or ""):
        name = "json_tools"
    if name is None:
        return None
    module = load_tool_module(name)
    parse = _normalised(_OURS.get(name) or _mlx_vlms(name, module.parse_tool_call))
    return ToolFormat(
        name,
        module.tool_call_start,
        module.tool_call_end,
        parse,
        is_json=name in _JSON,
        brackets=_BRACKETS.get(name),
    )


def reasoning_format(template: str | None) -> ReasoningFormat | None:
    """The marks of thoughts that a chat template knows; None if it knows none."""
    text = template or ""
    found = (marks for told, marks in _THOUGHTS.items() if any(each in text for each in told))
    return next(found, None)


def _mlx_vlms(name: str, parse: Callable[..., Any]) -> _Parse:
    """Parsers that are not ours take as long as they like: they get no long texts."""

    def parsed(text: str, tools: Sequence[Mapping[str, Any]]) -> Any:
        if len(text) > call_parsers.MAX_SYNTAX_CHARACTERS:
            raise ValueError("it is too long")
        if name == "minimax_m3":
            _check_invokes(text)
        found = parse(text, list(tools))
        calls = found if isinstance(found, list) else [found]
        return [(call["name"], call.get("arguments")) for call in calls]

    return parsed


def _check_invokes(text: str) -> None:
    """Raises ValueError if one is cut short: mlx-vlm would pass over it, after a long search."""
    are_closing = [bool(found["closes"]) for found in _INVOKE.finditer(text)]
    if are_closing != [False, True] * (len(are_closing) // 2):
        raise ValueError("a call is cut short")


def _normalised(parse: _Parse) -> ParseCalls:
    """`parse` with arguments as the JSON of an object, and ValueError for all that goes wrong."""

    def parsed(text: str, tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
        try:
            calls = [(_name(name), _object(arguments)) for name, arguments in parse(text, tools)]
        except Exception as error:  # noqa: BLE001 - parsers raise whatever the text makes them
            raise ValueError(f"no tool call: {error}") from None
        if not calls:
            raise ValueError("no tool call")
        return calls

    return parsed


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name.strip():
        raise ValueError("a call has no name")
    return name.strip()


def _object(arguments: Any) -> str:
    if isinstance(arguments, str):
        arguments = json.loads(arguments) if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict) or not all(isinstance(key, str) for key in arguments):
        raise ValueError("arguments are no object")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()  # no half of a surrogate pair
    return text
