"""Inputs of requests for vectors and scores: texts, pictures, or both, in the forms of clients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from vlm_server.api.dialects.fields import Count, prepare
from vlm_server.api.dialects.openai import schema
from vlm_server.api.dialects.openai.messages import file_parts
from vlm_server.api.parsing.conversation import Conversation, Counts
from vlm_server.api.parsing.ignored_fields import IgnoredFields
from vlm_server.api.parsing.media.external import is_external
from vlm_server.errors import InvalidRequest
from vlm_server.protocol import ContentPart, Message, PoolingInput
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
    "must be a text, a list of content parts (`text`, `image_url`, `video_url`, `file`), an object "
    "with `content`, or one with `text` or `image`"
)
_DATA_IMAGE = "data:image/"
_VIDEO_TYPES = ("video_url", "video")
_LONGEST_SCHEME = 16
TokenIds = Annotated[list[Count], Meta(min_length=1)]
Parts = list[schema.ContentPart]
InputType = Annotated[str, Meta(max_length=64)]


class Content(Struct):
    """Content parts in an object, as vLLM and Cohere have them."""

    content: str | list[schema.ContentPart]


class TextOrImage(Struct):
    """Jina's form of an input; `image` is a URL, or base64."""

    text: str | None = None
    image: str | None = None


prepare(Content, TextOrImage)


@dataclass(frozen=True, slots=True)
class InputParser:
    """Parses the inputs of one request; fields without effect go to `ignored`."""

    conversation: Conversation
    ignored: IgnoredFields

    def parse(self, value: Any, param: str) -> PoolingInput:
        """An input that is no list of token ids. Raises RequestError and NeedsProcess."""
        parts = tuple(self._parts(value, param))
        self.conversation.check_content("user", parts, param)
        return PoolingInput((Message("user", parts, param=param),), param=param)

    def _parts(self, value: Any, param: str) -> Iterator[ContentPart]:
        match value:
            case str() if value.startswith(_DATA_IMAGE):
                yield self.conversation.image(value, param)
            case str():
                yield self.conversation.text(value, param)
            case list():
                yield from self._typed_parts(self._convert(value, Parts, param), param)
            case {"content": _}:
                content = self._convert(value, Content, param).content
                parts = [schema.TextPart(content)] if isinstance(content, str) else content
                yield from self._typed_parts(parts, param)
            case {"type": _}:
                yield from self._typed_parts(self._convert([value], Parts, param), param)
            case {"text": _} | {"image": _}:
                yield from self._text_or_image(self._convert(value, TextOrImage, param), param)
            case _:
                raise InvalidRequest(f"`{param}` {_FORMS}.", param)

    def _typed_parts(self, parts: list[schema.ContentPart], param: str) -> Iterator[ContentPart]:
        for i, part in enumerate(parts):
            place = f"{param}[{i}]" if len(parts) > 1 else param
            match part:
                case schema.ImageUrlPart(image_url=url):
                    data, detail = (url, None) if isinstance(url, str) else (url.url, url.detail)
                    yield self.conversation.image(data, place, detail)
                case schema.VideoUrlPart() | schema.VideoPart():
                    fields = schema.video_fields(part, place)
                    yield self.conversation.video(part.url, place, fields)
                case schema.FilePart(file=file):
                    yield from file_parts(file, place, self.conversation)
                case schema.RefusalPart():
                    raise InvalidRequest(f"`{place}` is a refusal, and no input.", place)
                case _:
                    yield self.conversation.text(part.text, place)

    def _text_or_image(self, value: TextOrImage, param: str) -> Iterator[ContentPart]:
        if value.image is not None:
            is_url = ":" in value.image[:_LONGEST_SCHEME] or is_external(value.image)
            add = self.conversation.image if is_url else self.conversation.base64_image
            yield add(value.image, f"{param}.image")
        if value.text is not None:
            yield self.conversation.text(value.text, f"{param}.text")

    def _convert(self, value: Any, form: Any, param: str) -> Any:
        try:
            converted = msgspec.convert(value, form)
        except (msgspec.ValidationError, UnicodeEncodeError):  # the latter at a lone surrogate
            raise InvalidRequest(f"`{param}` {_FORMS}.", param) from None
        self.ignored.add_unread(value, converted, f"{param.partition('[')[0]}[]")
        return converted


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
        videos=sum(isinstance(part, dict) and part.get("type") in _VIDEO_TYPES for part in flat),
    ).check(limits, param)


def pooling_type(name: str | None) -> str:
    """The input type that a client's `name` means; empty for none."""
    return _TYPES.get(name or "", name or "")


def _flat(value: Any) -> list[Any]:
    """The content parts of an input, as far as its form is known."""
    if isinstance(value, dict):
        value = value.get("content", value)
    return value if isinstance(value, list) and value and isinstance(value[0], dict) else [value]


def _is_image(part: Any) -> bool:
    if isinstance(part, dict):
        return part.get("type") in ("image_url", "file") or part.get("image") is not None
    return isinstance(part, str) and part.startswith(_DATA_IMAGE)
