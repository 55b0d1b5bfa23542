"""Tools of a request, and earlier calls of them, as every dialect reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vlm_server.api.parsing import json_body
from vlm_server.api.parsing.conversation import Conversation
from vlm_server.api.parsing.json_schema import schema_text
from vlm_server.errors import InvalidRequest
from vlm_server.protocol import Tools

MAX_TOOLS = 512
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """A tool; `parameters` is the JSON schema of its arguments, `param` the path of its field."""

    name: str
    param: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The tools that the model may or must call, see `protocol.Tools`; `param` names the field."""

    mode: Literal["none", "auto", "required"] = "auto"
    allowed: tuple[str, ...] = ()
    parallel: bool = True
    param: str = "tool_choice"


def read_tools(
    definitions: Sequence[ToolDefinition], choice: ToolChoice, conversation: Conversation
) -> Tools | None:
    """The tools for the model; None if there are none to call. Raises InvalidRequest."""
    _check_names(definitions, choice)
    if not definitions or choice.mode == "none":
        return None
    allowed = choice.allowed
    if choice.mode == "auto" and allowed:  # the model can't call unknown tools
        definitions = [tool for tool in definitions if tool.name in allowed]
        allowed = ()
    openai_tools = [_as_openai(tool, conversation) for tool in definitions]
    text = json.dumps(openai_tools, ensure_ascii=False)
    conversation.count_text(text, "tools")
    return Tools(
        definitions=text,
        choice=choice.mode,
        allowed=allowed,
        parallel=choice.parallel,
        strict=tuple(tool.name for tool in definitions if tool.strict),
    )


def object_text(arguments: str | dict[str, Any], param: str) -> str:
    """The arguments of a call as the JSON of an object, which chat templates need.

    The text of a truncated call is no object; the model sees it as the argument `arguments`, since
    the conversation would be refused for ever otherwise. Raises InvalidRequest for arguments that
    can't be encoded as JSON, or as UTF-8 once their escapes are read.
    """
    if isinstance(arguments, dict):
        return _dump(arguments, param)
    if not arguments.strip():
        return "{}"
    json_body.utf8_length(arguments, param)
    try:
        fields = json_body.parse_object(arguments.encode())
    except InvalidRequest:
        return _dump({"arguments": arguments}, param)
    _dump(fields, param)
    return arguments


def _check_names(definitions: Sequence[ToolDefinition], choice: ToolChoice) -> None:
    if len(definitions) > MAX_TOOLS:
        raise InvalidRequest(f"At most {MAX_TOOLS} tools are allowed.", "tools")
    names = set[str]()
    for tool in definitions:
        if not _NAME.fullmatch(tool.name):
            raise InvalidRequest(
                f"`{tool.param}.name` must have 1 to 128 letters, digits, `_`, `-` or `.`.",
                f"{tool.param}.name",
            )
        if tool.name in names:
            raise InvalidRequest(f"There are two tools called `{tool.name}`.", tool.param)
        names.add(tool.name)
    if choice.mode == "required" and not definitions:
        raise InvalidRequest("A tool must be called, but there are no `tools`.", choice.param)
    for name in choice.allowed:
        json_body.utf8_length(name, choice.param)
    if unknown := [name for name in choice.allowed if name not in names]:
        raise InvalidRequest(f"There is no tool called `{unknown[0][:128]}`.", choice.param)


def _as_openai(tool: ToolDefinition, conversation: Conversation) -> dict[str, Any]:
    """`tool` in OpenAI's form, which chat templates expect."""
    parameters = tool.parameters if tool.parameters is not None else _NO_PARAMETERS
    schema_text(parameters, conversation.limits, f"{tool.param}.parameters")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = parameters
    return {"type": "function", "function": function}


def _dump(arguments: dict[str, Any], param: str) -> str:
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise InvalidRequest(f"`{param}` has a number that is too large.", param) from None
    json_body.utf8_length(text, param)
    return text
