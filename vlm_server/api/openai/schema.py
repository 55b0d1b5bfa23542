"""The JSON of a chat request: its fields and their bounds.

A field either takes effect, or is on one of the two lists below, or is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.json import Decoder

from vlm_server.api.http.intake import json_body
from vlm_server.api.openai.response_format import ResponseFormat
from vlm_server.errors import UnsupportedField

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_STOP_CHARS = 256
MAX_BIASES = 1024
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 8

HARMLESS = frozenset(
    {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user"}
)
"""Fields that do not change the answer: accepted with any value and ignored."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, False, True),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None,),
    "web_search_options": (None,),
}
"""OpenAI's fields that are not supported, and the values of them that have no effect."""

RULES = {
    "role": "must be 'system', 'developer', 'user' or 'assistant'",
    "type": "must be 'text', 'image_url' or 'video_url'",
    "detail": "must be 'auto', 'low' or 'high'",
    "response_format.type": "must be 'text', 'json_object' or 'json_schema'",
}
"""What a field must be, by its path or name; completes the message of an error."""


class TextPart(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str


class ImageUrl(Struct, forbid_unknown_fields=True):
    """With `detail` low the image is scaled down, with high up to what pointing at things needs."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ImageUrlPart(Struct, tag_field="type", tag="image_url", forbid_unknown_fields=True):
    image_url: ImageUrl | str


class VideoUrl(Struct, forbid_unknown_fields=True):
    url: str


class VideoUrlPart(Struct, tag_field="type", tag="video_url", forbid_unknown_fields=True):
    video_url: VideoUrl | str


ContentPart = TextPart | ImageUrlPart | VideoUrlPart

Nothing = Annotated[list[Any], Meta(max_length=0)] | None


class ChatMessage(Struct, forbid_unknown_fields=True):
    """The fields after `content` come from answers that clients send back; they must be empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]
    annotations: Nothing = None
    audio: None = None
    function_call: None = None
    name: None = None
    refusal: None = None
    tool_calls: Nothing = None


class PixelLimits(Struct, forbid_unknown_fields=True):
    """Width times height of every image, as the model sees it."""

    min_pixels: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None
    max_pixels: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool = False


MaxTokens = Annotated[int, Meta(ge=1, le=INT32_MAX)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]


class ChatRequest(Struct, forbid_unknown_fields=True):
    model: str
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    stop: StopString | list[StopString] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_BIASES)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    response_format: ResponseFormat | None = None
    mm_processor_kwargs: PixelLimits | None = None


Decoder(ChatRequest)
"""Made for what it leaves behind: msgspec's notes on these types. Two threads that make them at
the same time, for the first two requests, crash the process."""


def parse(body: bytes | bytearray) -> ChatRequest:
    """The request in `body`. Raises InvalidRequest, naming the field at fault."""
    return read(json_body.parse_object(body))


def read(fields: dict[str, Any]) -> ChatRequest:
    """The request of a body's `fields`. Raises InvalidRequest, naming the field at fault."""
    obeyed = {name: value for name, value in fields.items() if not _is_ignored(name, value)}
    return json_body.convert(obeyed, ChatRequest, RULES)


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
