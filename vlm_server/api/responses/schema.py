"""The JSON of a request for a response: its fields and their bounds.

A field either takes effect, or is one of those that are ignored and reported, or is refused by
name. Fields of items, parts and tools that are not known are ignored and reported.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Struct
from msgspec.json import Decoder

from vlm_server.api.http.intake import json_body
from vlm_server.api.http.intake.leniency import without_unknown
from vlm_server.api.responses import items
from vlm_server.api.responses.ignored import Ignored
from vlm_server.api.responses.items import Item
from vlm_server.errors import InvalidRequest, UnsupportedField

INT32_MAX = 2**31 - 1
MAX_TOP_LOGPROBS = 20
LOGPROBS = "message.output_text.logprobs"

ECHOED = frozenset(
    {"max_tool_calls", "prompt_cache_key", "safety_identifier", "truncation", "user"}
)
"""Fields that the response repeats, and that have no other effect."""

HARMLESS = ECHOED | {
    "client_metadata",
    "moderation",
    "prompt_cache_options",
    "prompt_cache_retention",
    "service_tier",
}
"""Fields that do not change the answer: accepted with any value, ignored and reported."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "context_management": (None, []),
    "conversation": (None,),
    "prompt": (None,),
}
"""OpenAI's fields that are not supported, and the values of them that have no effect."""

RULES = {
    "role": "must be 'user', 'assistant', 'system' or 'developer'",
    "detail": "must be 'auto', 'low', 'high' or 'original'",
    "effort": "must be 'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or 'max'",
    "text.format.type": "must be 'text', 'json_object' or 'json_schema'",
    "thinking.type": "must be 'enabled', 'disabled' or 'auto'",
    "include": "has something that this server does not know",
    "type": "is a type that this server does not know",
}
"""What a field must be, by its path or name; completes the message of an error."""

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
"""All but the first have no effect: there is nothing of the kind in an answer."""


class FunctionTool(Struct, tag_field="type", tag="function"):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Struct, tag_field="type", tag="function"):
    name: str


class AllowedTools(Struct, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Meta(min_length=1)]


ToolChoice = Literal["none", "auto", "required"] | NamedFunction | AllowedTools


class TextFormat(Struct, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(Struct, tag_field="type", tag="json_object"):
    pass


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema"):
    """`name` and `description` have no effect; the schema is enforced, `strict` or not."""

    schema: dict[str, Any]
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    strict: bool | None = None


class TextConfig(Struct):
    format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ThoughtTokens = Annotated[int, Meta(ge=0, le=INT32_MAX)]


class ReasoningConfig(Struct):
    """`summary` has no effect: thoughts are shown in full. `max_tokens` is not OpenAI's."""

    effort: Effort | None = None
    max_tokens: ThoughtTokens | None = None
    summary: str | None = None


class Thinking(Struct):
    """Not OpenAI's, but sent by clients of other servers."""

    type: Literal["enabled", "disabled", "auto"] = "auto"
    budget_tokens: ThoughtTokens | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Events are never padded."""

    include_obfuscation: bool | None = None


Penalty = Annotated[float, Meta(ge=-2, le=2)]
MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]


class ResponsesRequest(Struct, forbid_unknown_fields=True):
    model: str
    input: str | Annotated[list[Item], Meta(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    thinking: Thinking | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    include: list[Include] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def items(self) -> list[Item]:
        """`input` as items."""
        if isinstance(self.input, str):
            return [items.MessageItem("user", self.input)]
        return self.input


Decoder(ResponsesRequest)
"""Made for what it leaves behind: msgspec's notes on these types. Two threads that make them at
the same time, for the first two requests, crash the process."""


class Parsed(NamedTuple):
    """A request, what the response repeats of it though it has no effect, and what is ignored."""

    request: ResponsesRequest
    echoed: dict[str, Any]
    ignored: tuple[str, ...]


def parse(body: bytes | bytearray, *, refuses: bool = True) -> Parsed:
    """The request in `body`.

    Raises InvalidRequest, naming the field at fault: one that is unknown, if it `refuses` those.
    """
    fields = json_body.parse_object(body)
    ignored = Ignored()
    obeyed = {name: value for name, value in fields.items() if not _is_ignored(name, value)}
    for name in sorted(HARMLESS & fields.keys()):
        ignored.add(name, fields[name])
    if not refuses:
        obeyed = without_unknown(obeyed, ResponsesRequest, ignored)
    items.prepare(obeyed.get("input"))
    _refuse_tools(obeyed)
    request = json_body.convert(obeyed, ResponsesRequest, RULES)
    ignored.look_into(obeyed)
    return Parsed(request, {name: fields.get(name) for name in ECHOED}, ignored.names)


def _is_ignored(name: str, value: Any) -> bool:
    if name in HARMLESS:
        return True
    if name not in NEUTRAL:
        return False
    if not any(_same(value, neutral) for neutral in NEUTRAL[name]):
        raise UnsupportedField(f"`{name}` is not supported with this value; leave it out.", name)
    return True


def _same(value: Any, neutral: Any) -> bool:
    """Equality where True is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _refuse_tools(fields: dict[str, Any]) -> None:
    """Raises UnsupportedField for tools that OpenAI runs itself, or that are no functions."""
    tools = fields.get("tools")
    for i, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else "function"
        if kind is None:
            raise InvalidRequest(f"`tools[{i}].type` is missing.", f"tools[{i}].type")
        if kind != "function":
            param = f"tools[{i}].type"
            raise UnsupportedField(
                f"`{param}`: only tools of type `function` are supported.", param
            )
    choice = fields.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else "function"
    if kind not in ("function", "allowed_tools"):
        param = "tool_choice.type"
        raise UnsupportedField(f"`{param}`: only `function` and `allowed_tools` are.", param)
