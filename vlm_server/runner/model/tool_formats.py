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
from vlm_server.runner.model import call_parsers, gemma_calls

AUTO, NONE = "auto", "none"
_Parse = Callable[[str, Sequence[Mapping[str, Any]]], Any]
_OURS: dict[str, _Parse] = {
    "cohere2_moe": call_parsers.cohere2_moe,
    "gemma4": lambda text, _: gemma_calls.parse(text),
    "glm47": call_parsers.glm47,
    "json_tools": call_parsers.json_tools,
    "longcat": call_parsers.longcat,
    "minimax_m2": call_parsers.minimax_m2,
    "mistral": call_parsers.mistral,
    "pythonic": call_parsers.pythonic,
    "qwen3_coder": call_parsers.qwen3_coder,
}
_JSON_CALL = re.compile(r"<tool_call>.*\"name\\?\"", re.DOTALL)
"""In templates like Qwen's, whatever they call their variables."""
_CALL_BEGINS = {
    "atem": re.compile(r"<atem:invoke\b"),
    "kimi_k2": re.compile(r"<\|tool_call_begin\|>"),
    "minimax_m3": re.compile(r"<invoke\b"),
}
"""mlx-vlm's parsers of several calls pass over those that are cut short: they are counted."""
_THOUGHTS = {
    ("<|channel>", "<channel|>"): ReasoningFormat("<|channel>thought", "<channel|>"),
    ("<|channel|>analysis",): ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>"),
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
    return ToolFormat(name, module.tool_call_start, module.tool_call_end, parse)


def reasoning_format(template: str | None) -> ReasoningFormat | None:
    """The marks of thoughts that a chat template knows; None if it knows none."""
    text = template or ""
    found = (marks for told, marks in _THOUGHTS.items() if any(each in text for each in told))
    return next(found, None)


def _mlx_vlms(name: str, parse: Callable[..., Any]) -> _Parse:
    begins = _CALL_BEGINS.get(name)

    def parsed(text: str, tools: Sequence[Mapping[str, Any]]) -> Any:
        found = parse(text, list(tools))
        calls = found if isinstance(found, list) else [found]
        if begins is not None and len(begins.findall(text)) > max(len(calls), 1):
            raise ValueError("a call is cut short")
        return [(call["name"], call.get("arguments")) for call in calls]

    return parsed


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
