"""Small tool formats as models have them, parsers to go with them, and what pieces add up to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from vlm_server.engine.output.answer_parser import AnswerParser, build_parser
from vlm_server.engine.output.formats import Formats, ToolFormat
from vlm_server.engine.output.pieces import Piece, ReasoningPiece
from vlm_server.interfaces import AnswerFormat
from vlm_server.interfaces.model_spec import ReasoningFormat
from vlm_server.protocol import ToolCallDelta


def _parse_json(body: str, _: Sequence[Mapping[str, Any]]) -> Sequence[tuple[str, str]]:
    call = json.loads(body)
    return [(call["name"], json.dumps(call["arguments"]))]


def _parse_xml(body: str, _: Sequence[Mapping[str, Any]]) -> Sequence[tuple[str, str]]:
    call = re.fullmatch(r"\s*<function=(\w+)>(.*)</function>\s*", body, re.DOTALL)
    if call is None:
        raise ValueError(body)
    found = re.findall(r"<parameter=(\w+)>\n(.*?)\n</parameter>", call[2], re.DOTALL)
    return [(call[1], json.dumps(dict(found)))]


def _parse_list(body: str, _: Sequence[Mapping[str, Any]]) -> Sequence[tuple[str, str]]:
    return [(call["name"], json.dumps(call["arguments"])) for call in json.loads(body)]


HERMES = ToolFormat("json_tools", "<tool_call>", "</tool_call>", _parse_json, is_json=True)
XML = ToolFormat(
    "qwen3_coder",
    "<tool_call>",
    "</tool_call>",
    _parse_xml,
    brackets=("<function=", "</function>"),
)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "", _parse_list, is_json=True)
THINK = ReasoningFormat("<think>", "</think>")

TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("look", "click")
)
ANSWER = AnswerFormat(TOOLS)
FORCED = AnswerFormat(TOOLS, is_required=True)

Event = tuple[str, ...]
"""("text", text), ("thought", text) or ("call", name, arguments)."""


def parser(
    tool_format: ToolFormat | None = HERMES,
    reasoning: ReasoningFormat | None = THINK,
    answer: AnswerFormat = ANSWER,
    *,
    is_json: bool = False,
    **changes: object,
) -> AnswerParser:
    answer = replace(answer, **changes)  # type: ignore[arg-type]
    text_parser = build_parser(Formats(tool_format, reasoning), answer, is_json=is_json)
    assert text_parser is not None
    return text_parser


def read(text_parser: AnswerParser, pieces: Iterable[str]) -> list[Piece]:
    """All events of the text in `pieces`."""
    found = list[Piece]()
    for piece in pieces:
        text_parser.announce(piece, 0)
        found += text_parser.push(piece)
        if text_parser.is_ended:
            break
    return found + list(text_parser.flush())


def merged(pieces: Iterable[Piece]) -> list[Event]:
    """The events merged to whole texts and calls; asserts that they are consistent."""
    events = list[Event]()
    ids = list[str]()
    for piece in pieces:
        match piece:
            case ToolCallDelta(index, call_id, name, arguments):
                if call_id:
                    assert (index, bool(name)) == (len(ids), True)
                    ids.append(call_id)
                    events.append(("call", name, arguments))
                else:
                    kind, begun, sent = events[-1]
                    assert (kind, index, name) == ("call", len(ids) - 1, "")
                    events[-1] = (kind, begun, sent + arguments)
            case _:
                kind, text = (
                    ("thought", piece.text)
                    if isinstance(piece, ReasoningPiece)
                    else ("text", piece)
                )
                assert text, "nothing is no news"
                if events and events[-1][0] == kind:
                    events[-1] = (kind, events[-1][1] + text)
                else:
                    events.append((kind, text))
    assert len(set(ids)) == len(ids)
    return events


def split_at(text: str, places: Iterable[int]) -> list[str]:
    """`text` in pieces; places beyond its end do not count."""
    cuts = sorted({0, len(text), *(place for place in places if place < len(text))})
    return [text[start:end] for start, end in pairwise(cuts)]
