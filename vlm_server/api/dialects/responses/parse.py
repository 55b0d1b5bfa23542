"""From the body of a request for a response to its fields, and what of them has no effect."""

from __future__ import annotations

from typing import Any, NamedTuple

from vlm_server.api.dialects.responses import items
from vlm_server.api.dialects.responses.items import Item, MessageItem, OutputText, Reasoning
from vlm_server.api.dialects.responses.schema import (
    ECHOED,
    HARMLESS,
    LOGPROBS,
    NEUTRAL,
    RULES,
    ResponsesRequest,
    StreamOptions,
)
from vlm_server.api.parsing import json_body
from vlm_server.api.parsing.leniency import IgnoredFields, check_neutral, known_fields
from vlm_server.errors import InvalidRequest, UnsupportedField


class Parsed(NamedTuple):
    """A request, what the response repeats of it though it has no effect, and what is ignored."""

    request: ResponsesRequest
    echoed: dict[str, Any]
    ignored: IgnoredFields


def parse(body: bytes | bytearray, *, refuses: bool = True) -> Parsed:
    """The request in `body`.

    Raises InvalidRequest, naming the field at fault: one that is unknown, if it `refuses` those.
    """
    fields = json_body.parse_object(body)
    ignored = IgnoredFields()
    obeyed = {name: value for name, value in fields.items() if not _is_ignored(name, value)}
    for name in sorted(HARMLESS & fields.keys()):
        ignored.add(name, fields[name])
    obeyed = known_fields(obeyed, ResponsesRequest, ignored, refuses=refuses)
    items.prepare(obeyed.get("input"))
    _read_tools(obeyed, ignored)
    request = json_body.convert(obeyed, ResponsesRequest, RULES)
    _look_into(obeyed, request, ignored)
    return Parsed(request, {name: fields.get(name) for name in ECHOED}, ignored)


def _functions(tool: Any, param: str, ignored: IgnoredFields) -> list[Any]:
    kind = tool.get("type") if isinstance(tool, dict) else "function"
    if kind is None:
        raise InvalidRequest(f"`{param}.type` is missing.", f"{param}.type")
    if kind == "function":
        return [tool]
    if kind == "namespace":
        return _functions_of_namespace(tool, param, ignored)
    if isinstance(kind, str) and kind.startswith("web_search"):
        ignored.add("tools[].web_search")
        return []
    param += ".type"
    raise UnsupportedField(
        f"`{param}`: only tools of type `function`, or `namespace` with such, are supported.", param
    )


def _functions_of_namespace(
    tool: dict[str, Any], param: str, ignored: IgnoredFields
) -> list[dict[str, Any]]:
    """The functions of a namespace, each with its name; the model is not told of that."""
    name, inner = tool.get("name"), tool.get("tools")
    if not isinstance(name, str):
        raise InvalidRequest(f"`{param}.name` must be a string.", f"{param}.name")
    if not isinstance(inner, list):
        raise InvalidRequest(f"`{param}.tools` must be a list.", f"{param}.tools")
    for i, each in enumerate(inner):
        if not isinstance(each, dict) or each.get("type") != "function":
            param = f"{param}.tools[{i}].type"
            raise UnsupportedField(f"`{param}`: a namespace may have functions alone.", param)
    ignored.add("tools[].namespace")
    return [{**each, "namespace": name} for each in inner]


def _look_into(fields: dict[str, Any], request: ResponsesRequest, ignored: IgnoredFields) -> None:
    """What has no effect in the `fields` that `request` was made of."""
    ignored.add_unread(fields, request)
    _look_into_items(request.items, ignored)
    if request.text is not None:
        ignored.add("text.verbosity", request.text.verbosity)
    if request.reasoning is not None:
        ignored.add("reasoning.summary", request.reasoning.summary)
    _look_into_stream_options(request.stream_options or StreamOptions(), ignored)
    for each in request.include or ():
        if each != LOGPROBS:
            ignored.add(f"include.{each}")


def _look_into_stream_options(options: StreamOptions, ignored: IgnoredFields) -> None:
    """Only what asks for another stream than the one there is."""
    if options.include_obfuscation:
        ignored.add("stream_options.include_obfuscation")
    if options.include_usage is False:
        ignored.add("stream_options.include_usage")


def _look_into_items(given: list[Item], ignored: IgnoredFields) -> None:
    """Fields that are kept for who asks for an item, and have no effect."""
    for item in given:
        if item.status != "completed" and not (item is given[-1] and items.is_unfinished(item)):
            ignored.add("input[].status", item.status)
        match item:
            case MessageItem(phase=phase):
                ignored.add("input[].phase", phase)
            case Reasoning(summary=summary):
                ignored.add("input[].summary", summary)
    for part in items.parts_of(given):
        if isinstance(part, OutputText):
            ignored.add("input[].content[].annotations", part.annotations)


def _is_ignored(name: str, value: Any) -> bool:
    if name in HARMLESS:
        return True
    if name not in NEUTRAL:
        return False
    check_neutral(name, value, NEUTRAL[name])
    return True


def _read_tools(fields: dict[str, Any], ignored: IgnoredFields) -> None:
    """Leave the functions in `tools`, those of namespaces too.

    Raises UnsupportedField for tools that OpenAI runs itself, but for searching the web, which a
    model does without.
    """
    tools = fields.get("tools")
    if isinstance(tools, list):
        named = [(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
        fields["tools"] = [each for tool in named for each in _functions(*tool, ignored)]
    choice = fields.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else "function"
    if kind not in ("function", "allowed_tools"):
        param = "tool_choice.type"
        raise UnsupportedField(f"`{param}`: only `function` and `allowed_tools` are.", param)
