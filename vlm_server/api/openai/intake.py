"""From the body of a chat request to a `Submit`, with all limits checked.

Runs on a thread or in an intake process: see `http.intake`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vlm_server.api.http.intake import json_body
from vlm_server.api.http.intake.calls import Body, Context, Taken
from vlm_server.api.http.intake.conversation import Conversation, Counts
from vlm_server.api.openai import schema
from vlm_server.api.openai.options import Options, encode_options
from vlm_server.api.openai.sampling import read_sampling
from vlm_server.api.openai.schema import (
    ChatMessage,
    ChatRequest,
    ImageUrlPart,
    PixelLimits,
    StreamOptions,
    VideoUrlPart,
)
from vlm_server.errors import InvalidRequest, ModelNotFound
from vlm_server.protocol import ContentPart, Message, Submit

_LOW_DETAIL_SIDE_PIXELS = 512
"""As OpenAI documents for `detail` low."""


DIALECT = "openai"


def read_chat(body: Body, context: Context) -> Taken:
    """The request in `body`. Raises RequestError.

    Raises BytesNeeded if it has `https:` or `file:` URLs whose bytes are not in `context.given`,
    and no error besides: to be called again with them.
    """
    return read_fields(json_body.parse_object(body), context)


def read_text(body: Body, context: Context) -> Taken | None:
    """The request in `body`; None if it has media. Raises RequestError."""
    return read_text_fields(json_body.parse_object(body), context)


def read_fields(fields: dict[str, Any], context: Context) -> Taken:
    """The request of a body's fields: see `read_chat`."""
    return _taken(schema.read(fields), context)


def read_text_fields(fields: dict[str, Any], context: Context) -> Taken | None:
    """The request of a body's fields: see `read_text`."""
    request = schema.read(fields)
    has_media = any(isinstance(part, ImageUrlPart | VideoUrlPart) for part in _parts(request))
    return None if has_media else _taken(request, context)


def _taken(request: ChatRequest, context: Context) -> Taken:
    if request.model not in (context.model, "default"):
        raise ModelNotFound(f"This server has one model: `{context.model}`.", "model")
    stream = bool(request.stream)
    if request.stream_options is not None and not stream:
        raise InvalidRequest("`stream_options` requires `stream`.", "stream_options")
    sampling = read_sampling(request, context.limits)
    conversation = Conversation(context.limits, context.given)
    read_pixel_limits(request.mm_processor_kwargs, conversation)
    _read_messages(request, conversation)
    submit = Submit(
        request_id=context.request_id,
        messages=tuple(conversation.messages),
        images=tuple(conversation.images),
        sampling=sampling,
        videos=tuple(conversation.videos),
        cache_salt=context.cache_salt,
        client=context.client,
    )
    wanted = request.stream_options or StreamOptions()
    return Taken(submit, stream, encode_options(Options(wanted.include_usage)))


def read_pixel_limits(wanted: PixelLimits | None, conversation: Conversation) -> None:
    """The sizes that all images of a request are to have. Raises InvalidRequest."""
    if wanted is None:
        return
    least, most = wanted.min_pixels, wanted.max_pixels
    if least is not None and most is not None and least > most:
        raise InvalidRequest(
            "`min_pixels` is above `max_pixels`.", "mm_processor_kwargs.min_pixels"
        )
    conversation.min_pixels, conversation.max_pixels = least, most


def _read_messages(request: ChatRequest, conversation: Conversation) -> None:
    if not any(message.role == "user" for message in request.messages):
        raise InvalidRequest("At least one message must have the role 'user'.", "messages")
    _counts(request).check(conversation.limits)
    for i, message in enumerate(request.messages):
        conversation.add(_message(message, f"messages[{i}].content", conversation))
    conversation.check_complete()


def _counts(request: ChatRequest) -> Counts:
    parts = list(_parts(request))
    num_texts = sum(isinstance(message.content, str) for message in request.messages)
    return Counts(
        messages=len(request.messages),
        parts=len(parts) + num_texts,
        images=sum(isinstance(part, ImageUrlPart) for part in parts),
        videos=sum(isinstance(part, VideoUrlPart) for part in parts),
    )


def _parts(request: ChatRequest) -> Iterator[schema.ContentPart]:
    for message in request.messages:
        if not isinstance(message.content, str):
            yield from message.content


def _message(message: ChatMessage, param: str, conversation: Conversation) -> Message:
    role = "system" if message.role == "developer" else message.role
    if isinstance(message.content, str):
        return Message(role, (conversation.text(message.content, param),))
    if not message.content:
        raise InvalidRequest(f"`{param}` is empty.", param)
    parts = (
        _part(part, role, f"{param}[{i}]", conversation) for i, part in enumerate(message.content)
    )
    return Message(role, tuple(parts))


def _part(
    part: schema.ContentPart, role: str, param: str, conversation: Conversation
) -> ContentPart:
    match part:
        case ImageUrlPart(image_url=url) if role == "user":
            given, detail = (url, None) if isinstance(url, str) else (url.url, url.detail)
            max_side_pixels = _LOW_DETAIL_SIDE_PIXELS if detail == "low" else None
            return conversation.image(given, param, max_side_pixels, for_grounding=detail == "high")
        case VideoUrlPart(video_url=url) if role == "user":
            return conversation.video(url if isinstance(url, str) else url.url, param)
        case ImageUrlPart():
            raise InvalidRequest(f"Images are not allowed in messages of role '{role}'.", param)
        case VideoUrlPart():
            raise InvalidRequest(f"Videos are not allowed in messages of role '{role}'.", param)
        case _:
            return conversation.text(part.text, param)
