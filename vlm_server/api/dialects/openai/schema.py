"""The JSON of a chat request: its fields and their bounds.

A field has an effect, is on one of the two lists below, or is refused by name. Unknown fields in
messages and parts are ignored: see `api.parsing.ignored_fields`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from vlm_server.api.dialects.fields import (
    EFFORT_RULE,
    CalledFunction,
    Count,
    Dpi,
    Effort,
    ImageDetail,
    MinP,
    NamedSchema,
    PageList,
    Penalty,
    RepetitionPenalty,
    Seed,
    Size,
    StrictFunction,
    Temperature,
    TopK,
    TopLogprobs,
    TopP,
    prepare,
    read_request,
)
from vlm_server.api.parsing.common_fields import StopString
from vlm_server.api.parsing.ignored_fields import IgnoredFields, is_same
from vlm_server.api.parsing.media.video_options import (
    Fps,
    MediaLoading,
    MediaOptions,
    ProcessorOptions,
    VideoFields,
    VideoOptions,
    fields_of,
)
from vlm_server.api.parsing.parsed_request import Context

MAX_BIASES = 1024
MAX_CHOICES = 8

HARMLESS = frozenset(
    {
        "cache_control", "metadata", "moderation", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "safety_identifier", "user"
    }
)  # fmt: skip
"""Fields that do not change the answer: accepted with any value, ignored and reported."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
"""Fields that are not supported, with their values without effect."""

RULES = {
    "role": "must be 'system', 'developer', 'user', 'assistant' or 'tool'",
    "type": "must be 'text', 'image_url', 'video_url', 'video' or 'file'",
    "tools[].type": "must be 'function'",
    "messages[].tool_calls[].type": "must be 'function'",
    "tool_choice": "must be 'none', 'auto', 'required', or an object that names tools",
    "tool_choice.type": "must be 'function' or 'allowed_tools'",
    "thinking.type": "must be 'enabled', 'disabled', 'auto' or 'adaptive'",
    "reasoning_effort": EFFORT_RULE,
    "reasoning.effort": EFFORT_RULE,
    "detail": "must be 'auto', 'low', 'high' or 'original'",
    "prediction.type": "must be 'content'",
    "response_format.type": "must be 'text', 'json_object' or 'json_schema'",
}
"""The rule on a field in error messages, by the field's path or name."""


# ---- messages ----------------------------------------------------------------------------


class TextPart(Struct, tag_field="type", tag="text"):
    text: str


class RefusalPart(Struct, tag_field="type", tag="refusal"):
    """An assistant's refusal in place of an answer."""

    refusal: str


class ImageUrl(Struct):
    url: str
    detail: ImageDetail | None = None


class ImageUrlPart(Struct, tag_field="type", tag="image_url"):
    image_url: ImageUrl | str


class VideoUrl(VideoOptions, kw_only=True):
    url: str


class VideoUrlPart(VideoOptions, tag_field="type", tag="video_url", kw_only=True):
    video_url: VideoUrl | str

    @property
    def url(self) -> str:
        return self.video_url if isinstance(self.video_url, str) else self.video_url.url


class VideoPart(VideoOptions, tag_field="type", tag="video", kw_only=True):
    """Qwen's form of a video: its URL, or those of its frames."""

    video: str | list[str]

    @property
    def url(self) -> str | list[str]:
        return self.video


class File(Struct):
    """A document, or with `file_id` an uploaded image, video or document.

    file_data: a URL, or base64. file_id: its id, or `sha256:` and the hash of its bytes. The
    fields from `pages` on are our extension.
    """

    file_data: str | None = None
    filename: str | None = None
    file_id: str | None = None
    pages: PageList | None = None
    dpi: Dpi | None = None
    max_pixels: Size | None = None
    include_text: bool | None = None


class FilePart(Struct, tag_field="type", tag="file"):
    file: File


VIDEO_PARTS = (VideoUrlPart, VideoPart)
MediaPart = TextPart | RefusalPart | ImageUrlPart | VideoUrlPart | VideoPart
ContentPart = MediaPart | FilePart


def video_fields(part: VideoUrlPart | VideoPart, param: str) -> VideoFields:
    """The fields of the part `param` about its frames, some of them inside `video_url`.

    Raises InvalidRequest if two contradict each other.
    """
    inner = part.video_url if isinstance(part, VideoUrlPart) else None
    return fields_of((param, part), (f"{param}.video_url", inner))


class ToolCall(Struct, tag_field="type", tag="function"):
    id: Annotated[str, Meta(min_length=1)]
    function: CalledFunction


class ChatMessage(Struct):
    """A message; `reasoning` means `reasoning_content`. `audio` and `function_call` are refused."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    audio: None = None
    function_call: None = None


# ---- tools -------------------------------------------------------------------------------


class FunctionTool(Struct, tag_field="type", tag="function"):
    function: StrictFunction


class FunctionName(Struct):
    name: str


class NamedTool(Struct, tag_field="type", tag="function"):
    """The tool that must be called, in `tool_choice`."""

    function: FunctionName


class AllowedTools(Struct):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1)]


class AllowedToolsChoice(Struct, tag_field="type", tag="allowed_tools"):
    allowed_tools: AllowedTools


WantedChoice = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice


# ---- the answer --------------------------------------------------------------------------


class TextFormat(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    json_schema: None = None


class JsonObjectFormat(Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    json_schema: None = None


class JsonSchema(NamedSchema, forbid_unknown_fields=True):
    pass


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class Thinking(Struct, forbid_unknown_fields=True):
    """Anthropic's `thinking`; `auto` and `adaptive` leave the decision to the template."""

    type: Literal["enabled", "disabled", "auto", "adaptive"]
    budget_tokens: Count | None = None


class ReasoningConfig(Struct, forbid_unknown_fields=True):
    """OpenRouter's `reasoning`."""

    effort: Effort | None = None
    max_tokens: Count | None = None
    enabled: bool | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Options of a stream; `include_obfuscation` has no effect: streams are never padded."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Prediction(Struct, forbid_unknown_fields=True):
    """The expected text of the answer."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class AnswerFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that chat and text completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Size | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    seed: Seed | None = None
    stop: StopString | list[StopString] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASES)]
        | None
    ) = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    response_format: ResponseFormat | None = None


class ChatRequest(AnswerFields, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Size | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: WantedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    thinking: Thinking | None = None
    reasoning: ReasoningConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    mm_processor_kwargs: ProcessorOptions | None = None
    media_io_kwargs: MediaLoading | None = None
    video_fps: Fps | None = None
    prediction: Prediction | None = None

    @property
    def media_options(self) -> MediaOptions:
        return MediaOptions(
            mm_processor_kwargs=self.mm_processor_kwargs,
            media_io_kwargs=self.media_io_kwargs,
            video_fps=self.video_fps,
        )


prepare(ChatRequest)


def parse(fields: dict[str, Any], context: Context) -> tuple[ChatRequest, IgnoredFields]:
    """The request of a body's `fields`, and those without effect.

    Raises InvalidRequest, naming the field at fault.
    """
    limited = fields | {
        name: None
        for name in ("max_tokens", "max_completion_tokens")
        if is_same(fields.get(name), _NO_LIMIT)
    }
    return read_request(limited, ChatRequest, RULES, context, harmless=HARMLESS, neutral=NEUTRAL)


_NO_LIMIT = -1
"""LM Studio's `max_tokens` for the default."""
