"""The JSON of a request for a response: its fields and their bounds.

A field either takes effect, or is one of those that are ignored and reported, or is refused by
name. Fields of items, parts and tools that are not known are ignored and reported.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.json import Decoder

from vlm_server.api.dialects.responses import items
from vlm_server.api.dialects.responses.items import InputItem, Item, ItemReference, MessageItem

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
    "min_p": (None, 0),
    "priority": (None, 0),
    "prompt": (None,),
    "repetition_penalty": (None, 1),
    "top_k": (None, -1),
}
"""Fields that are not supported, and the values of them that have no effect: OpenAI's, and those
that the Shepherd Model Gateway adds to every request."""

RULES = {
    "role": "must be 'user', 'assistant', 'system' or 'developer'",
    "detail": "must be 'auto', 'low', 'high' or 'original'",
    "effort": "must be 'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or 'max'",
    "text.format.type": "must be 'text', 'json_object' or 'json_schema'",
    "thinking.type": "must be 'enabled', 'disabled', 'auto' or 'adaptive'",
    "include": "has something that this server does not know",
    "input[].type": "must be 'message', 'function_call', 'function_call_output', 'reasoning' or "
    "'item_reference'",
    "input[].content[].type": f"must be {items.PART_TYPES}",
    "input[].output[].type": "must be 'input_text' or 'input_image'",
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
    """Calls say the `namespace` of their tool, if it has one; the model is not told of it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    namespace: str | None = None


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
    """Not OpenAI's, but sent by clients of other servers.

    `auto` and `adaptive` leave it to the template, as does nothing.
    """

    type: Literal["enabled", "disabled", "auto", "adaptive"] | None = None
    budget_tokens: ThoughtTokens | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Events are never padded. `include_usage` is not OpenAI's: the last event always has it."""

    include_obfuscation: bool | None = None
    include_usage: bool | None = None


Penalty = Annotated[float, Meta(ge=-2, le=2)]
MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]


class ResponsesRequest(Struct, forbid_unknown_fields=True):
    """`ignore_eos` is vLLM's."""

    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    model: str | None = None
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
    ignore_eos: bool | None = None

    @property
    def items(self) -> list[Item]:
        """`input` as items, without references to others."""
        if isinstance(self.input, str):
            return [MessageItem("user", self.input)]
        return [item for item in self.input if not isinstance(item, ItemReference)]

    @property
    def references(self) -> list[str]:
        """The ids of the items that `input` refers to."""
        given = () if isinstance(self.input, str) else self.input
        return [item.id for item in given if isinstance(item, ItemReference)]


Decoder(ResponsesRequest)
"""Made for what it leaves behind: msgspec's notes on these types. Two threads that make them at
the same time, for the first two requests, crash the process."""
