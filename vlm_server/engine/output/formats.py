"""Formats in which models write tool calls and reasoning.

mlx-vlm has the marks and a parser of each format; `call_parsers.py` and `tagged_calls.py` replace
the parsers that are wrong. All raise only ValueError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from vlm_server.engine.output import call_parsers, tagged_calls
from vlm_server.interfaces.model_spec import ModelSpec, ReasoningFormat, ToolParser

ParseCalls = Callable[[str, Sequence[Mapping[str, Any]]], Sequence[tuple[str, str]]]
"""(text between the marks, tools in the chat templates' form) to each call's name and arguments.

The arguments are the JSON of an object. Raises ValueError if the text is no call."""
_Parse = Callable[[str, Sequence[Mapping[str, Any]]], Any]


class _Known(NamedTuple):
    """A known format; for the other fields, see `ToolFormat`."""

    parse: _Parse | None
    """Our parser; None where mlx-vlm's is right."""
    is_json: bool = False
    brackets: tuple[str, ...] | None = None
    further_starts: tuple[str, ...] = ()


_KNOWN: dict[str, _Known] = {
    "atem": _Known(tagged_calls.atem, brackets=("<atem:invoke", "</atem:invoke>")),
    "cohere2_moe": _Known(call_parsers.cohere2_moe, is_json=True),
    "gemma4": _Known(call_parsers.gemma4, brackets=("{", "}")),
    "glm47": _Known(call_parsers.glm47, brackets=("<arg_key>", "</arg_value>")),
    "harmony": _Known(
        call_parsers.harmony,
        is_json=True,
        further_starts=("to=functions.", "<|channel|>analysis to="),
    ),
    "json_tools": _Known(call_parsers.json_tools, is_json=True),
    "kimi_k2": _Known(call_parsers.kimi_k2, is_json=True),
    "longcat": _Known(call_parsers.longcat, brackets=("<longcat_arg_key>", "</longcat_arg_value>")),
    "minicpm5": _Known(None, brackets=("<param", "</param>")),
    "minimax_m2": _Known(tagged_calls.minimax_m2, brackets=("<invoke", "</invoke>")),
    "minimax_m3": _Known(None, brackets=("<invoke", "</invoke>")),
    "mistral": _Known(call_parsers.mistral, is_json=True),
    "pythonic": _Known(call_parsers.pythonic, brackets=("(", ")", "]")),
    "qwen3_coder": _Known(tagged_calls.qwen3_coder, brackets=("<function=", "</function>")),
}
_INVOKE = re.compile(r"\]<\]minimax\[>\[<(?P<closes>/?)invoke\b")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Marks before and after a call or a list of calls, and the parser of the text between."""

    name: str
    start: str
    end: str
    """Empty if a call ends with its JSON."""
    parse: ParseCalls
    is_json: bool = False
    """Whether arguments are JSON, in whose strings no mark counts."""
    brackets: tuple[str, ...] | None = None
    """For other arguments, the opening bracket and all closing ones: an end mark counts after a
    closing one, or before the opening one."""
    further_starts: tuple[str, ...] = ()
    """Other marks before a call, which count only at the beginning of a message."""


@dataclass(frozen=True, slots=True)
class Formats:
    """A model's formats of tool calls and reasoning; None where it has none."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @classmethod
    def of_model(cls, model: ModelSpec) -> Self:
        return cls(tool_format(model.tool_parser), model.reasoning_format)


NO_FORMATS = Formats()


def tool_format(parser: ToolParser | None) -> ToolFormat | None:
    """The format of a parser of mlx-vlm; None without a parser."""
    if parser is None:
        return None
    name = parser.name
    known_format = _KNOWN.get(name, _Known(None))
    parse = _normalise(known_format.parse or _bound_length(name, parser.parse))
    return ToolFormat(
        name,
        parser.start,
        parser.end,
        parse,
        known_format.is_json,
        known_format.brackets,
        known_format.further_starts,
    )


def _bound_length(name: str, parse: Callable[..., Any]) -> _Parse:
    """mlx-vlm's parser, whose time has no bound: long texts are refused."""

    def parsed(text: str, tools: Sequence[Mapping[str, Any]]) -> Any:
        if len(text) > call_parsers.MAX_SYNTAX_CHARACTERS:
            raise ValueError("it is too long")
        if name == "minimax_m3":
            _check_invokes(text)
        calls = parse(text, list(tools))
        calls = calls if isinstance(calls, list) else [calls]
        return [(call["name"], call.get("arguments")) for call in calls]

    return parsed


def _check_invokes(text: str) -> None:
    """Raises ValueError for a truncated call: mlx-vlm would skip it, after a long search."""
    are_closing = [bool(match["closes"]) for match in _INVOKE.finditer(text)]
    if are_closing != [False, True] * (len(are_closing) // 2):
        raise ValueError("a call is cut short")


def _normalise(parse: _Parse) -> ParseCalls:
    """`parse` with arguments as the JSON of an object, and ValueError for every error."""

    def parsed(text: str, tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
        try:
            calls = [(_name(name), _object(arguments)) for name, arguments in parse(text, tools)]
        except Exception as error:  # noqa: BLE001 - parsers may raise any exception
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
