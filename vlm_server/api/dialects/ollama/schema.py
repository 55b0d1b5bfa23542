"""The JSON of requests to `/api/chat` and `/api/generate`: their fields and their bounds.

A field that is not here is ignored, and reported: see `ignored`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct
from msgspec.json import Decoder

from vlm_server.api.parsing import json_body
from vlm_server.api.parsing.common_fields import StopString

MAX_TOP_LOGPROBS = 20
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

RULES = {
    "role": "must be 'system', 'developer', 'user', 'assistant' or 'tool'",
    "think": "must be true, false, 'low', 'medium' or 'high'",
    "format": "must be 'json' or a JSON schema",
    "type": "must be 'function'",
}
"""What a field must be, by its path or name; completes the message of an error."""


class FunctionCall(Struct):
    """`arguments` are an object; its text is taken, too."""

    name: str
    arguments: dict[str, Any] | str | None = None


class ToolCall(Struct):
    function: FunctionCall
    id: str | None = None


class ChatMessage(Struct):
    """`tool_name`, or `name`, is the tool that a message of the role `tool` is the result of."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    images: list[str] | None = None
    thinking: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    name: str | None = None
    tool_call_id: str | None = None


class Function(Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Struct):
    function: Function
    type: Literal["function"] | None = None


Penalty = Annotated[float, Meta(ge=-2, le=2)]


class ModelOptions(Struct):
    """Those of Ollama's `options` that have an effect here."""

    num_predict: Annotated[int, Meta(ge=-2, le=INT32_MAX)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    stop: StopString | list[StopString] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


class Request(Struct, kw_only=True):
    """What both routes have in common. `keep_alive`: see the module of that name."""

    model: str | None = None
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: ModelOptions | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class OllamaChatRequest(Request):
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None


class OllamaGenerateRequest(Request):
    """`suffix`, `template` and `raw` are refused if they are set."""

    prompt: str | None = None
    system: str | None = None
    images: list[str] | None = None
    suffix: str | None = None
    template: str | None = None
    raw: bool | None = None


Decoder(OllamaChatRequest)
Decoder(OllamaGenerateRequest)
"""Made for what they leave behind: msgspec's notes on these types. Two threads that make them at
the same time, for the first two requests, crash the process."""

R = TypeVar("R", bound=Request)

_WHOLE_NUMBERS = ("num_predict", "top_k", "seed")


def convert(fields: dict[str, Any], schema: type[R]) -> R:
    """`fields` as a request. Raises InvalidRequest, naming the field at fault."""
    options = fields.get("options")
    if isinstance(options, dict):
        fields = {**fields, "options": {**options, **_whole_numbers(options)}}
    return json_body.convert(fields, schema, RULES)


def _whole_numbers(options: dict[str, Any]) -> dict[str, int]:
    """Whole numbers that are written as 40.0: some clients know no others."""
    given = {name: options.get(name) for name in _WHOLE_NUMBERS}
    return {
        name: int(value)
        for name, value in given.items()
        if isinstance(value, float) and value.is_integer()
    }
