"""Inputs of requests for vectors and scores: texts, pictures, or both, in the forms of clients."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from vlm_server.api.dialects.fields import Count, prepare
from vlm_server.api.dialects.openai import schema
from vlm_server.api.parsing.conversation import Conversation, Counts
from vlm_server.api.parsing.parsed_request import Context
from vlm_server.errors import InvalidRequest
from vlm_server.protocol import (
    ContentPart,
    Message,
    Pooling,
    PoolingInput,
    SamplingParams,
    Submit,
)
from vlm_server.settings import Limits

MAX_VALUES = 1_000_000
"""The most values in the JSON of a request: inputs may be lists of token ids."""
_TYPES = {
    "query": "query",
    "search_query": "query",
    "document": "document",
    "passage": "document",
    "search_document": "document",
}
"""Input types of OpenAI's, Voyage's and NVIDIA's APIs, and Cohere's; others are a checkpoint's."""
_FORMS = (
    "must be a text, a list of content parts (`text`, `image_url`, `video_url`), an object with "
    "`content`, or one with `text` or `image`"
)
_DATA_IMAGE = "data:image/"
TokenIds = Annotated[list[Count], Meta(min_length=1)]
InputType = Annotated[str, Meta(max_length=64)]


class Content(Struct):
    """Content parts in an object, as vLLM and Cohere have them."""

    content: str | list[schema.ContentPart]


class TextOrImage(Struct):
    """Jina's form of an input; `image` is a URL, or base64."""

    text: str | None = None
    image: str | None = None


prepare(Content, TextOrImage)


def parse_input(value: Any, conversation: Conversation, param: str) -> PoolingInput:
    """An input that is no list of token ids. Raises RequestError and NeedsProcess."""
    parts = tuple(_parts(value, conversation, param))
    conversation.check_content("user", parts, param)
    return PoolingInput((Message("user", parts, param=param),), param=param)


def check_inputs(values: list[Any], limits: Limits, param: str) -> None:
    """Raises InvalidRequest for more inputs, parts or media than `limits` allow."""
    if len(values) > limits.max_inputs:
        raise InvalidRequest(
            f"At most {limits.max_inputs} inputs are allowed (limits.max_inputs).", param
        )
    flat = [part for value in values for part in _flat(value)]
    Counts(
        messages=0,
        parts=len(flat),
        images=sum(map(_is_image, flat)),
        videos=sum(isinstance(part, dict) and part.get("type") == "video_url" for part in flat),
    ).check(limits, param)


def pooling_type(name: str | None) -> str:
    """The input type that a client's `name` means; empty for none."""
    return _TYPES.get(name or "", name or "")


def submit_pooling(
    inputs: tuple[PoolingInput, ...], conversation: Conversation, context: Context, pooling: Pooling
) -> Submit:
    """The engine's request for vectors or scores."""
    return Submit(
        request_id=context.request_id,
        messages=(),
        images=tuple(conversation.images),
        sampling=SamplingParams(),
        videos=tuple(conversation.videos),
        cache_salt=context.cache_salt,
        client=context.client,
        pooling=pooling,
        inputs=inputs,
    )


def _parts(value: Any, conversation: Conversation, param: str) -> list[ContentPart]:
    match value:
        case str() if value.startswith(_DATA_IMAGE):
            return [conversation.image(value, param)]
        case str():
            return [conversation.text(value, param)]
        case list():
            return _typed_parts(value, conversation, param)
        case {"content": _}:
            return _typed_parts(_convert(value, Content, param).content, conversation, param)
        case {"type": _}:
            return _typed_parts([value], conversation, param)
        case {"text": _} | {"image": _}:
            return _text_or_image(_convert(value, TextOrImage, param), conversation, param)
    raise InvalidRequest(f"`{param}` {_FORMS}.", param)


def _typed_parts(value: Any, conversation: Conversation, param: str) -> list[ContentPart]:
    if isinstance(value, str):
        return [conversation.text(value, param)]
    parts = list[ContentPart]()
    for i, part in enumerate(_convert(value, list[schema.ContentPart], param)):
        place = f"{param}[{i}]" if len(value) > 1 else param
        match part:
            case schema.ImageUrlPart(image_url=url):
                data, detail = (url, None) if isinstance(url, str) else (url.url, url.detail)
                parts.append(conversation.image(data, place, detail))
            case schema.VideoUrlPart(video_url=url):
                data = url if isinstance(url, str) else url.url
                parts.append(conversation.video(data, place))
            case schema.RefusalPart():
                raise InvalidRequest(f"`{place}` can't be embedded: it is a refusal.", place)
            case _:
                parts.append(conversation.text(part.text, place))
    return parts


def _text_or_image(value: TextOrImage, conversation: Conversation, param: str) -> list[ContentPart]:
    parts = list[ContentPart]()
    if value.image is not None:
        is_url = ":" in value.image[:16]
        add = conversation.image if is_url else conversation.base64_image
        parts.append(add(value.image, f"{param}.image"))
    if value.text is not None:
        parts.append(conversation.text(value.text, f"{param}.text"))
    return parts


def _convert(value: Any, form: Any, param: str) -> Any:
    if isinstance(value, msgspec.Struct) or _is_converted(value):
        return value
    try:
        return msgspec.convert(value, form)
    except (msgspec.ValidationError, UnicodeEncodeError):  # the latter at a lone surrogate
        raise InvalidRequest(f"`{param}` {_FORMS}.", param) from None


def _is_converted(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], msgspec.Struct)


def _flat(value: Any) -> list[Any]:
    """The content parts of an input, as far as its form is known."""
    if isinstance(value, dict):
        value = value.get("content", value)
    return value if isinstance(value, list) and value and isinstance(value[0], dict) else [value]


def _is_image(part: Any) -> bool:
    if isinstance(part, dict):
        return part.get("type") == "image_url" or part.get("image") is not None
    return isinstance(part, str) and part.startswith(_DATA_IMAGE)
