"""How a model writes tool calls and reasoning, as its chat template tells."""

from __future__ import annotations

import re

from mlx_vlm.tools.registry import SPECS, _infer_tool_parser, load_tool_module

from vlm_server.errors import ModelLoadError
from vlm_server.interfaces.model_spec import ReasoningFormat, ToolParser

AUTO, NONE = "auto", "none"
_JSON_CALL = re.compile(r"<tool_call>.*\"name\\?\"", re.DOTALL)
"""In templates like Qwen's, whatever they call their variables."""
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


def tool_parser(template: str | None, parser: str) -> ToolParser | None:
    """The parser for a model with this chat template; None if it calls no tools.

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
    return ToolParser(name, module.tool_call_start, module.tool_call_end, module.parse_tool_call)


def reasoning_format(template: str | None) -> ReasoningFormat | None:
    """The marks of thoughts that a chat template knows; None if it knows none."""
    text = template or ""
    found = (marks for told, marks in _THOUGHTS.items() if any(each in text for each in told))
    return next(found, None)
