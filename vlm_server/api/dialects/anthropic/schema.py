"""The JSON of Anthropic's messages: the fields that have an effect, and their bounds.

Other fields, at the top as well as inside, are ignored and reported: Anthropic's clients
add some with every release. Blocks of other types are refused, since they are part of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from vlm_server.api.dialects.fields import (
    EFFORT_RULE,
    Count,
    Dpi,
    Effort,
    PageList,
    Size,
    Temperature,
    TopP,
    prepare,
)
from vlm_server.api.parsing import json_body
from vlm_server.api.parsing.common_fields import StopString
from vlm_server.api.parsing.ignored_fields import IgnoredFields
from vlm_server.errors import ThreadUnsupported

SIGNATURE = "dmxtX3NlcnZlcg=="
"""Signature of all reasoning in answers; clients send it back."""

_SOURCES = "must be 'base64', 'url' or 'file', or of documents 'text' or 'content'"
RULES = {
    "role": "must be 'user', 'assistant' or 'system'",
    "type": "must be 'text' or 'image'; in the user's messages also 'document' or "
    "'tool_result', in the assistant's 'tool_use', 'thinking' or 'redacted_thinking'",
    "messages[].content[].source.type": _SOURCES,
    "messages[].content[].content[].source.type": _SOURCES,
    "messages[].content[].content[].type": "must be 'text', 'image' or 'document'",
    "messages[].content[].source.content[].type": "must be 'text' or 'image'",
    "system[].type": "must be 'text'",
    "media_type": "must be 'text/plain'",
    "tool_choice.type": "must be 'auto', 'any', 'tool' or 'none'",
    "thinking.type": "must be 'enabled', 'disabled' or 'adaptive'",
    "display": "must be 'summarized' or 'omitted'",
    "output_config.format.type": "must be 'json_schema'",
    "output_config.effort": EFFORT_RULE,
}
"""The rule on a field in error messages, by the field's path or name."""


class TextBlock(Struct, tag_field="type", tag="text"):
    text: str


class Base64Source(Struct, tag_field="type", tag="base64"):
    """Base64 of an image or a document, whose bytes tell the format; `media_type` is ignored."""

    data: str
    media_type: str | None = None


class UrlSource(Struct, tag_field="type", tag="url"):
    url: str


class FileSource(Struct, tag_field="type", tag="file"):
    """An uploaded image or document: its id, or `sha256:` and the hash of its bytes."""

    file_id: str


class ImageBlock(Struct, tag_field="type", tag="image"):
    source: Base64Source | UrlSource | FileSource


class TextSource(Struct, tag_field="type", tag="text"):
    """A document that is plain text."""

    data: str
    media_type: Literal["text/plain"] | None = None


class ContentSource(Struct, tag_field="type", tag="content"):
    """A document of the client's own blocks."""

    content: str | list[TextBlock | ImageBlock]


class CitationsConfig(Struct):
    enabled: bool | None = None


class DocumentBlock(Struct, tag_field="type", tag="document"):
    """A document; the fields from `pages` on are our extension."""

    source: Base64Source | UrlSource | FileSource | TextSource | ContentSource
    title: Annotated[str, Meta(max_length=500)] | None = None
    context: str | None = None
    citations: CitationsConfig | None = None
    pages: PageList | None = None
    dpi: Dpi | None = None
    max_pixels: Size | None = None
    include_text: bool | None = None


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Struct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """Reasoning; `signature` is not checked, since it may come from any model."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Struct, tag_field="type", tag="redacted_thinking"):
    """Encrypted reasoning, left out of the prompt."""

    data: str


ContentBlock = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | ToolUseBlock
    | ToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
)


class InputMessage(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class Tool(Struct):
    """The client's own tool if `type` is `custom` or omitted; else see `builtin_tools`."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    display_width_px: Size | None = None
    display_height_px: Size | None = None
    enable_zoom: bool | None = None
    max_characters: Size | None = None


class AutoChoice(Struct, tag_field="type", tag="auto"):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(Struct, tag_field="type", tag="any"):
    disable_parallel_tool_use: bool | None = None


class NamedChoice(Struct, tag_field="type", tag="tool"):
    """A tool to be called once: `disable_parallel_tool_use` has no effect."""

    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(Struct, tag_field="type", tag="none"):
    pass


class ThinkingEnabled(Struct, tag_field="type", tag="enabled"):
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class ThinkingAdaptive(Struct, tag_field="type", tag="adaptive"):
    """The model's template decides whether to reason."""

    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class ThinkingDisabled(Struct, tag_field="type", tag="disabled"):
    pass


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema"):
    schema: dict[str, Any]


class OutputConfig(Struct):
    """`effort` asks for reasoning, as OpenAI's `reasoning_effort` does."""

    format: JsonSchemaFormat | None = None
    effort: Effort | None = None


class MessagesRequest(Struct):
    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    max_tokens: Size | None = None
    stream: bool | None = None
    stop_sequences: list[StopString] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Count | None = None
    tools: list[Tool] | None = None
    tool_choice: AutoChoice | AnyChoice | NamedChoice | NoChoice | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = None
    output_config: OutputConfig | None = None


prepare(MessagesRequest)


def parse(
    body: bytes | bytearray, without_effect: Sequence[str] = ()
) -> tuple[MessagesRequest, IgnoredFields]:
    """The request in `body`, and its ignored fields, including those `without_effect`.

    Raises InvalidRequest, naming the field at fault, also for a `thread`: its messages are not the
    whole conversation. Clients then send all of it.
    """
    fields = json_body.parse_object(body)
    if fields.get("thread") is not None:
        raise ThreadUnsupported(
            "`thread` is not supported: conversations are not kept here. Send all messages.",
            "thread",
        )
    request = json_body.convert(fields, MessagesRequest, RULES)
    ignored = IgnoredFields()
    ignored.add_unread(fields, request)
    ignored.add_given(fields, *without_effect)
    return request, ignored
