"""`tools` and `tool_choice`: their JSON, and what the model may call by them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from vlm_server.api.parsing.tools import ToolChoice, ToolDefinition


class Function(Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Struct, tag_field="type", tag="function"):
    function: Function


class FunctionName(Struct):
    name: str


class NamedTool(Struct, tag_field="type", tag="function"):
    """The tool that has to be called, in `tool_choice`."""

    function: FunctionName


class AllowedTools(Struct):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1)]


class AllowedToolsChoice(Struct, tag_field="type", tag="allowed_tools"):
    allowed_tools: AllowedTools


WantedChoice = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice


def definitions_of(tools: list[FunctionTool] | None) -> list[ToolDefinition]:
    """`tools` as every dialect has them."""
    return [
        ToolDefinition(
            name=tool.function.name,
            param=f"tools[{i}].function",
            description=tool.function.description,
            parameters=tool.function.parameters,
            strict=bool(tool.function.strict),
        )
        for i, tool in enumerate(tools or ())
    ]


def choice_of(wanted: WantedChoice | None, parallel: bool) -> ToolChoice:
    """`tool_choice` as every dialect has it. A tool that is named is called once."""
    match wanted:
        case NamedTool(function=FunctionName(name=name)):
            return ToolChoice("required", (name,), parallel=False)
        case AllowedToolsChoice(allowed_tools=AllowedTools(mode=mode, tools=tools)):
            return ToolChoice(mode, tuple(tool.function.name for tool in tools), parallel)
        case None:
            return ToolChoice("auto", parallel=parallel)
        case str(mode):
            return ToolChoice(mode, parallel=parallel)
