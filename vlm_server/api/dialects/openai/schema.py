"""The JSON of a chat request: its fields and their bounds.

A field either takes effect, or is on one of the two lists below, or is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.json import Decoder

from vlm_server.api.dialects.openai.messages import ChatMessage, TextPart
from vlm_server.api.dialects.openai.response_format import ResponseFormat
from vlm_server.api.dialects.openai.thinking import Effort, Reasoning, Thinking
from vlm_server.api.dialects.openai.tools import FunctionTool, WantedChoice
from vlm_server.api.parsing import json_body
from vlm_server.api.parsing.common_fields import StopString
from vlm_server.api.parsing.leniency import IgnoredFields, check_neutral, is_same, known_fields

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_BIASES = 1024
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 8

HARMLESS = frozenset(
    {
        "cache_control",
        "metadata",
        "moderation",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "user",
    }
)
"""Fields that do not change the answer: accepted with any value and ignored, and named as such."""

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
"""Fields that are not supported, and the values of them that have no effect."""

_EFFORTS = "must be 'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or 'max'"

RULES = {
    "role": "must be 'system', 'developer', 'user', 'assistant' or 'tool'",
    "type": "must be 'text', 'image_url' or 'video_url'; send documents as images of their pages",
    "tools[].type": "must be 'function'",
    "messages[].tool_calls[].type": "must be 'function'",
    "tool_choice": "must be 'none', 'auto', 'required', or an object that names tools",
    "tool_choice.type": "must be 'function' or 'allowed_tools'",
    "thinking.type": "must be 'enabled', 'disabled', 'auto' or 'adaptive'",
    "reasoning_effort": _EFFORTS,
    "reasoning.effort": _EFFORTS,
    "detail": "must be 'auto', 'low', 'high' or 'original'",
    "prediction.type": "must be 'content'",
    "response_format.type": "must be 'text', 'json_object' or 'json_schema'",
}
"""What a field must be, by its path or name; completes the message of an error."""


class PixelLimits(Struct, forbid_unknown_fields=True):
    """Width times height of every image, as the model sees it."""

    min_pixels: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None
    max_pixels: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    """`include_obfuscation` would add nothing to streams on the own machine: it is ignored."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


MaxTokens = Annotated[int, Meta(ge=1, le=INT32_MAX)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]


class Prediction(Struct, forbid_unknown_fields=True):
    """What the answer is expected to be like."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatRequest(Struct, forbid_unknown_fields=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    model: str | None = None
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
    tools: list[FunctionTool] | None = None
    tool_choice: WantedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    thinking: Thinking | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    mm_processor_kwargs: PixelLimits | None = None
    prediction: Prediction | None = None


Decoder(ChatRequest)
"""Made for what it leaves behind: msgspec's notes on these types. Two threads that make them at
the same time, for the first two requests, crash the process."""


def parse(body: bytes | bytearray, ignored: IgnoredFields, *, refuses: bool = True) -> ChatRequest:
    """The request in `body`: see `read`."""
    return read(json_body.parse_object(body), ignored, refuses=refuses)


def read(fields: dict[str, Any], ignored: IgnoredFields, *, refuses: bool = True) -> ChatRequest:
    """The request of a body's `fields`; what has no effect goes to `ignored`.

    Raises InvalidRequest, naming the field at fault: one that is unknown, if it `refuses` those.
    """
    obeyed = {name: value for name, value in fields.items() if not _is_neutral(name, value)}
    for name in sorted(HARMLESS & obeyed.keys()):
        ignored.add(name, obeyed.pop(name))
    obeyed = known_fields(obeyed, ChatRequest, ignored, refuses=refuses)
    for name in ("max_tokens", "max_completion_tokens"):
        if is_same(obeyed.get(name), _NO_LIMIT):
            del obeyed[name]
    request = json_body.convert(obeyed, ChatRequest, RULES)
    ignored.add_unread(obeyed, request)
    return request


_NO_LIMIT = -1
"""What LM Studio's documents send as `max_tokens`: the default is meant."""


def _is_neutral(name: str, value: Any) -> bool:
    if name not in NEUTRAL:
        return False
    check_neutral(name, value, NEUTRAL[name])
    return True
