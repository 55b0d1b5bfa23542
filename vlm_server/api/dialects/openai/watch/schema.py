"""The body of `POST /v1/watch`: a standing question, and what counts as a change."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from vlm_server.api.dialects.fields import Size, effective_fields, prepare
from vlm_server.api.dialects.openai import decisions, schema
from vlm_server.api.dialects.openai.parse import parse_response_format
from vlm_server.api.dialects.openai.questions import Asked, Question
from vlm_server.api.parsing import json_body
from vlm_server.api.parsing.common_fields import model_wanted
from vlm_server.api.parsing.conversation import Conversation
from vlm_server.api.parsing.ignored_fields import IgnoredFields
from vlm_server.api.parsing.media.video_options import MediaOptions, ProcessorOptions
from vlm_server.api.parsing.parsed_request import Body, Context
from vlm_server.errors import InvalidRequest, UnsupportedField
from vlm_server.protocol import (
    Message,
    Pooling,
    PoolingInput,
    SamplingParams,
    Submit,
)
from vlm_server.settings import WatchSettings

DEFAULT_MAX_TOKENS = 256
DEFAULT_PIXEL_CHANGE = 16
DEFAULT_MIN_CHANGE = 0.002

Share = Annotated[float, Meta(ge=0, le=1)]
PixelChange = Annotated[int, Meta(ge=0, le=255)]
Seconds = Annotated[float, Meta(ge=0, le=86_400)]


class PixelLimits(Struct, forbid_unknown_fields=True):
    """Bounds on a frame's pixels, as the model sees it."""

    min_pixels: Size | None = None
    max_pixels: Size | None = None


class WatchRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """A request; `question` is answered in words, `questions` are those of `/v1/decisions`."""

    question: str | None = None
    response_format: schema.ResponseFormat | None = None
    max_tokens: Size | None = None
    questions: Annotated[dict[str, Question], Meta(min_length=1)] | None = None
    instructions: str | None = None
    url: str | None = None
    model: str | None = None
    window: Size | None = None
    min_change: Share | None = None
    pixel_change: PixelChange | None = None
    min_probability: Share | None = None
    interval_seconds: Seconds | None = None
    mm_processor_kwargs: PixelLimits | None = None


prepare(WatchRequest)


class WatchPlan(Struct, frozen=True):
    """What a watch asks, and when.

    submit: the engine's request without frames: they come first in its last message. asked: the
    questions with given options; empty for an answer in words, which is JSON if `is_json`. url: the
    camera's; empty if its client gives the frames.
    """

    model: str
    submit: Submit
    asked: tuple[Asked, ...]
    is_json: bool
    window: int
    min_change: float
    pixel_change: int
    min_probability: float
    interval_seconds: float
    min_pixels: int | None
    max_pixels: int | None
    url: str
    ignored: tuple[str, ...]


def parse_watch(body: Body, context: Context, settings: WatchSettings) -> WatchPlan:
    """The plan in `body`. Raises RequestError."""
    ignored = IgnoredFields()
    fields = effective_fields(
        json_body.parse_object(body), WatchRequest, ignored, context, harmless=schema.HARMLESS
    )
    decisions.check_questions(fields.get("questions"))
    request = json_body.convert(fields, WatchRequest, decisions.RULES)
    ignored.add_unread(fields, request)
    model = model_wanted(request.model, context)
    conversation = Conversation(context.limits, {}, text_param="question", on_thread=True)
    if limits := request.mm_processor_kwargs:
        bounds = ProcessorOptions(min_pixels=limits.min_pixels, max_pixels=limits.max_pixels)
        conversation.set_media_options(MediaOptions(mm_processor_kwargs=bounds))
    if request.instructions:
        content = (conversation.text(request.instructions, "instructions"),)
        conversation.add(Message("system", content), "instructions")
    if request.url is not None:
        json_body.utf8_length(request.url, "url")  # refuses lone surrogates
    asked, inputs, sampling = _question(request, conversation, context)
    submit = Submit(
        request_id=context.request_id,
        messages=tuple(conversation.messages),
        images=(),
        sampling=sampling,
        cache_salt=context.cache_salt,
        client=f"{context.client} watch",  # takes turns with the key's other requests
        pooling=Pooling("decide") if asked else None,
        inputs=inputs,
    )
    return WatchPlan(
        model=model.name,
        submit=submit,
        asked=asked,
        is_json=sampling.json_schema is not None,
        window=_window(request.window or 1, context, settings),
        min_change=_or(request.min_change, DEFAULT_MIN_CHANGE),
        pixel_change=int(_or(request.pixel_change, DEFAULT_PIXEL_CHANGE)),
        min_probability=request.min_probability or 0.0,
        interval_seconds=request.interval_seconds or 0.0,
        min_pixels=conversation.min_pixels,
        max_pixels=conversation.max_pixels,
        url=request.url or "",
        ignored=ignored.names,
    )


def _question(
    request: WatchRequest, conversation: Conversation, context: Context
) -> tuple[tuple[Asked, ...], tuple[PoolingInput, ...], SamplingParams]:
    """Add the user's message; returns the questions with options. Raises InvalidRequest."""
    if (request.question is None) == (request.questions is None):
        raise InvalidRequest("Give `question`, or `questions` with options.", "question")
    if request.question is not None:
        text = conversation.text(request.question, "question")
        if not text.text.strip():
            raise InvalidRequest("`question` is empty.", "question")
        conversation.add(Message("user", (text,)), "question")
        return (), (), _sampling(request, context)
    for name in ("response_format", "max_tokens"):
        if getattr(request, name) is not None:
            raise UnsupportedField(f"`{name}` goes with `question` alone.", name)
    assert request.questions is not None
    for name, question in request.questions.items():
        if question.type == "ranking":
            param = f"{decisions.param_of(name)}.type"
            raise UnsupportedField("A `ranking` can't be watched: use `choice`.", param)
    asked, inputs = decisions.read_questions(request.questions, conversation)
    conversation.add(Message("user", ()), "questions")
    return tuple(asked), inputs, SamplingParams()


def _sampling(request: WatchRequest, context: Context) -> SamplingParams:
    """Greedy, with the log probabilities of its tokens."""
    return SamplingParams(
        max_tokens=request.max_tokens or DEFAULT_MAX_TOKENS,
        temperature=0.0,
        logprobs=0,
        json_schema=parse_response_format(request.response_format, context.limits),
    )


def _window(window: int, context: Context, settings: WatchSettings) -> int:
    limit = min(settings.max_window, context.limits.max_images)
    if window > limit:
        raise InvalidRequest(
            f"`window` may be at most {limit} (watch.max_window, limits.max_images).", "window"
        )
    return window


def _or(value: Any, default: float) -> Any:
    return default if value is None else value
