"""The JSON of a request for a response: its fields and their bounds.

A field has an effect, is ignored and reported, or is refused by name. Unknown fields of items,
parts and tools are ignored and reported.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Struct

from vlm_server.api.dialects.fields import (
    EFFORT_RULE,
    Count,
    Effort,
    NamedSchema,
    Penalty,
    Size,
    StrictFunction,
    Temperature,
    TopLogprobs,
    TopP,
    effective_fields,
    prepare,
)
from vlm_server.api.dialects.responses import items
from vlm_server.api.parsing import json_body
from vlm_server.api.parsing.ignored_fields import IgnoredFields
from vlm_server.api.parsing.media.video_options import MediaOptions
from vlm_server.api.parsing.parsed_request import Body, Context
from vlm_server.errors import InvalidRequest, UnsupportedField

LOGPROBS = "message.output_text.logprobs"

ECHOED = frozenset(
    {"max_tool_calls", "prompt_cache_key", "safety_identifier", "truncation", "user"}
)
"""Fields that only appear in the response."""

HARMLESS = ECHOED | {
    "client_metadata",
    "moderation",
    "prompt_cache_options",
    "prompt_cache_retention",
    "service_tier",
}
"""Fields that do not change the answer: accepted with any value, ignored and reported."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "context_management": (None, []),
    "conversation": (None,),
    "min_p": (None, 0),
    "priority": (None, 0),
    "prompt": (None,),
    "repetition_penalty": (None, 1),
    "top_k": (None, -1),
}
"""Fields that are not supported, with their values without effect: OpenAI's, and those that the
Shepherd Model Gateway adds to every request."""

RULES = {
    "role": "must be 'user', 'assistant', 'system' or 'developer'",
    "detail": "must be 'auto', 'low', 'high' or 'original'",
    "effort": EFFORT_RULE,
    "text.format.type": "must be 'text', 'json_object' or 'json_schema'",
    "thinking.type": "must be 'enabled', 'disabled', 'auto' or 'adaptive'",
    "include": "has something that this server does not know",
    "input[].type": "must be 'message', 'function_call', 'function_call_output', 'reasoning' or "
    "'item_reference'",
    "input[].content[].type": f"must be {items.PART_TYPES}",
    "input[].output[].type": "must be 'input_text', 'input_image' or 'input_file'",
    "type": "is a type that this server does not know",
}
"""The rule on a field in error messages, by the field's path or name."""

Include = Literal[
    "message.output_text.logprobs",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""Values of `include`. All but the first have no effect."""


class FunctionTool(StrictFunction, tag_field="type", tag="function"):
    """A tool; its calls have its `namespace`, if any, which the model does not see."""

    namespace: str | None = None


class NamedTool(Struct, tag_field="type", tag="function"):
    name: str


class AllowedToolsChoice(Struct, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1)]


WantedChoice = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice


class TextFormat(Struct, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(Struct, tag_field="type", tag="json_object"):
    pass


class JsonSchemaFormat(NamedSchema, tag_field="type", tag="json_schema"):
    pass


class TextConfig(Struct):
    format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Struct):
    """OpenAI's `reasoning`. `summary` has no effect; `max_tokens` is an extension."""

    effort: Effort | None = None
    max_tokens: Count | None = None
    summary: str | None = None


class Thinking(Struct):
    """`thinking` of other servers; `auto`, `adaptive` and None leave it to the template."""

    type: Literal["enabled", "disabled", "auto", "adaptive"] | None = None
    budget_tokens: Count | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Options of a stream, without effect: events are not padded, the last one has the usage."""

    include_obfuscation: bool | None = None
    include_usage: bool | None = None


MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]


class ResponsesRequest(MediaOptions, forbid_unknown_fields=True):
    """A request; `ignore_eos` and the options of media are vLLM's extensions."""

    input: str | Annotated[list[items.InputItem], Meta(min_length=1)]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: WantedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    thinking: Thinking | None = None
    max_output_tokens: Size | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    include: list[Include] | None = None
    top_logprobs: TopLogprobs | None = None
    ignore_eos: bool | None = None

    @property
    def items(self) -> list[items.Item]:
        """The items of `input` that are not references."""
        if isinstance(self.input, str):
            return [items.MessageItem("user", self.input)]
        return [item for item in self.input if not isinstance(item, items.ItemReference)]

    @property
    def references(self) -> list[str]:
        """The ids of the items that `input` refers to."""
        input_items = () if isinstance(self.input, str) else self.input
        return [item.id for item in input_items if isinstance(item, items.ItemReference)]


prepare(ResponsesRequest)


# ---- parsing -----------------------------------------------------------------------------


class ParsedBody(NamedTuple):
    """A request, with the fields that the response repeats and the fields without effect."""

    request: ResponsesRequest
    echoed: dict[str, Any]
    ignored: IgnoredFields


def parse(body: Body, context: Context) -> ParsedBody:
    """The request in `body`. Raises InvalidRequest, naming the field at fault."""
    fields = json_body.parse_object(body)
    ignored = IgnoredFields()
    effective = effective_fields(
        fields, ResponsesRequest, ignored, context, harmless=HARMLESS, neutral=NEUTRAL
    )
    items.add_types(effective.get("input"))
    _flatten_tools(effective, ignored)
    request = json_body.convert(effective, ResponsesRequest, RULES)
    _report_ignored(effective, request, ignored)
    return ParsedBody(request, {name: fields.get(name) for name in ECHOED}, ignored)


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
    """The functions of a namespace, with its name, which the model does not get."""
    name, inner = tool.get("name"), tool.get("tools")
    if not isinstance(name, str):
        raise InvalidRequest(f"`{param}.name` must be a string.", f"{param}.name")
    if not isinstance(inner, list):
        raise InvalidRequest(f"`{param}.tools` must be a list.", f"{param}.tools")
    for i, function in enumerate(inner):
        if not isinstance(function, dict) or function.get("type") != "function":
            param = f"{param}.tools[{i}].type"
            raise UnsupportedField(f"`{param}`: a namespace may have functions alone.", param)
    ignored.add("tools[].namespace")
    return [{**function, "namespace": name} for function in inner]


def _report_ignored(
    fields: dict[str, Any], request: ResponsesRequest, ignored: IgnoredFields
) -> None:
    """Report fields without effect among the `fields` of `request`."""
    ignored.add_unread(fields, request)
    _report_items(request.items, ignored)
    if request.text is not None:
        ignored.add("text.verbosity", request.text.verbosity)
    if request.reasoning is not None:
        ignored.add("reasoning.summary", request.reasoning.summary)
    options = request.stream_options or StreamOptions()
    if options.include_obfuscation:
        ignored.add("stream_options.include_obfuscation")
    if options.include_usage is False:
        ignored.add("stream_options.include_usage")
    for field in request.include or ():
        if field != LOGPROBS:
            ignored.add(f"include.{field}")


def _report_items(input_items: list[items.Item], ignored: IgnoredFields) -> None:
    """Report fields of items that are only stored."""
    for item in input_items:
        if item.status != "completed" and not (
            item is input_items[-1] and items.is_unfinished(item)
        ):
            ignored.add("input[].status", item.status)
        match item:
            case items.MessageItem(phase=phase):
                ignored.add("input[].phase", phase)
            case items.ReasoningItem(summary=summary):
                ignored.add("input[].summary", summary)
    for part in items.parts_of(input_items):
        if isinstance(part, items.OutputText):
            ignored.add("input[].content[].annotations", part.annotations)


def _flatten_tools(fields: dict[str, Any], ignored: IgnoredFields) -> None:
    """Reduce `tools` to functions, those of namespaces included.

    Raises UnsupportedField for tools that OpenAI runs itself, except web search, which is ignored.
    """
    tools = fields.get("tools")
    if isinstance(tools, list):
        named_tools = [(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
        fields["tools"] = [
            function for tool in named_tools for function in _functions(*tool, ignored)
        ]
    choice = fields.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else "function"
    if kind not in ("function", "allowed_tools"):
        param = "tool_choice.type"
        raise UnsupportedField(f"`{param}`: only `function` and `allowed_tools` are.", param)
