"""The JSON of requests to `/api/chat` and `/api/generate`: their fields and their bounds.

Other fields are ignored, and reported.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct

from vlm_server.api.dialects.fields import (
    INT32_MAX,
    CalledFunction,
    Function,
    MinP,
    Penalty,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopLogprobs,
    prepare,
)
from vlm_server.api.parsing import json_body
from vlm_server.api.parsing.common_fields import StopString

RULES = {
    "role": "must be 'system', 'developer', 'user', 'assistant' or 'tool'",
    "think": "must be true, false, 'low', 'medium' or 'high'",
    "format": "must be 'json' or a JSON schema",
    "type": "must be 'function'",
}
"""The rule on a field in error messages, by the field's path or name."""


class ToolCall(Struct):
    function: CalledFunction
    id: str | None = None


class ChatMessage(Struct):
    """A message; in the role `tool`, `tool_name` or `name` is the tool of the result."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    images: list[str] | None = None
    thinking: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    name: str | None = None
    tool_call_id: str | None = None


class Tool(Struct):
    function: Function
    type: Literal["function"] | None = None


class ModelOptions(Struct):
    """The `options` with an effect."""

    num_predict: Annotated[int, Meta(ge=-2, le=INT32_MAX)] | None = None
    temperature: Temperature | None = None
    top_p: MinP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    stop: StopString | list[StopString] | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


class OllamaRequest(Struct, kw_only=True):
    """The fields of both routes. `keep_alive`: see `model_fields`."""

    model: str | None = None
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: ModelOptions | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None


class OllamaChatRequest(OllamaRequest):
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None


class OllamaGenerateRequest(OllamaRequest):
    """A request to `/api/generate`; `suffix`, `template` and `raw` are refused if set."""

    prompt: str | None = None
    system: str | None = None
    images: list[str] | None = None
    suffix: str | None = None
    template: str | None = None
    raw: bool | None = None


prepare(OllamaChatRequest, OllamaGenerateRequest)

R = TypeVar("R", bound=OllamaRequest)

_WHOLE_NUMBERS = ("num_predict", "top_k", "seed")


def convert(fields: dict[str, Any], schema: type[R]) -> R:
    """`fields` as a request. Raises InvalidRequest, naming the field at fault."""
    options = fields.get("options")
    if isinstance(options, dict):
        fields = {**fields, "options": {**options, **_whole_numbers(options)}}
    return json_body.convert(fields, schema, RULES)


def _whole_numbers(options: dict[str, Any]) -> dict[str, int]:
    """Whole numbers written as 40.0, the only form of some clients."""
    numbers = {name: options.get(name) for name in _WHOLE_NUMBERS}
    return {
        name: int(value)
        for name, value in numbers.items()
        if isinstance(value, float) and value.is_integer()
    }
