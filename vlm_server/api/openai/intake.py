"""From the body of a chat request to a `Submit`, with all limits checked.

Runs on a thread or in an intake process: see `http.intake`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from vlm_server.api.http.intake import json_body
from vlm_server.api.http.intake.calls import Body, Context, Taken
from vlm_server.api.openai import schema
from vlm_server.api.openai.sampling import read_sampling
from vlm_server.api.openai.schema import (
    ChatMessage,
    ChatRequest,
    ContentPart,
    ImageUrlPart,
    VideoUrlPart,
)
from vlm_server.errors import InvalidRequest, ModelNotFound
from vlm_server.media.external import BytesNeeded, ExternalUrl, is_external
from vlm_server.media.intake import Given, take_image, take_video
from vlm_server.protocol import (
    Image,
    ImagePart,
    Message,
    Submit,
    TextPart,
    Video,
    VideoPart,
)
from vlm_server.settings import Limits

_LOW_DETAIL_SIDE_PIXELS = 512
"""As OpenAI documents for `detail` low."""


DIALECT = "openai"


def read_chat(body: Body, context: Context) -> Taken:
    """The request in `body`. Raises RequestError.

    Raises BytesNeeded if it has `https:` or `file:` URLs whose bytes are not in `context.given`,
    and no error besides: to be called again with them.
    """
    return _taken(schema.parse(body), context)


def read_text(body: Body, context: Context) -> Taken | None:
    """The request in `body`; None if it has media. Raises RequestError."""
    request = schema.parse(body)
    has_media = any(isinstance(part, ImageUrlPart | VideoUrlPart) for part in _parts(request))
    return None if has_media else _taken(request, context)


def _taken(request: ChatRequest, context: Context) -> Taken:
    if request.model not in (context.model, "default"):
        raise ModelNotFound(f"This server has one model: `{context.model}`.", "model")
    stream = bool(request.stream)
    if request.stream_options is not None and not stream:
        raise InvalidRequest("`stream_options` requires `stream`.", "stream_options")
    options = request.stream_options
    sampling = read_sampling(request, context.limits)
    conversation = _Conversation(context.limits, context.given)
    conversation.read(request.messages)
    if conversation.needed:
        raise BytesNeeded(list(conversation.needed.values()))
    submit = Submit(
        request_id=context.request_id,
        messages=tuple(conversation.messages),
        images=tuple(conversation.images),
        sampling=sampling,
        videos=tuple(conversation.videos),
        cache_salt=context.cache_salt,
        client=context.client,
    )
    include_usage = options is not None and options.include_usage
    return Taken(submit, stream, include_usage)


def _parts(request: ChatRequest) -> Iterator[ContentPart]:
    for message in request.messages:
        if not isinstance(message.content, str):
            yield from message.content


@dataclass(slots=True)
class _Conversation:
    """Collects messages, images and videos, and checks the limits on them."""

    limits: Limits
    given: Given
    needed: dict[str, ExternalUrl] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    videos: list[Video] = field(default_factory=list)
    num_text_bytes: int = 0

    def read(self, messages: list[ChatMessage]) -> None:
        self._check_counts(messages)
        for i, message in enumerate(messages):
            self.messages.append(self._message(message, f"messages[{i}]"))

    def _check_counts(self, messages: list[ChatMessage]) -> None:
        """Checked before the first data URL is decoded."""
        limits = self.limits
        if len(messages) > limits.max_messages:
            raise InvalidRequest(f"At most {limits.max_messages} messages are allowed.", "messages")
        if not any(message.role == "user" for message in messages):
            raise InvalidRequest("At least one message must have the role 'user'.", "messages")
        contents = [m.content for m in messages if not isinstance(m.content, str)]
        num_parts = len(messages) - len(contents) + sum(map(len, contents))
        if num_parts > limits.max_parts:
            raise InvalidRequest(f"At most {limits.max_parts} parts are allowed.", "messages")
        parts = [part for content in contents for part in content]
        if sum(isinstance(part, ImageUrlPart) for part in parts) > limits.max_images:
            raise InvalidRequest(f"At most {limits.max_images} images are allowed.", "messages")
        if sum(isinstance(part, VideoUrlPart) for part in parts) > limits.max_videos:
            raise InvalidRequest(f"At most {limits.max_videos} videos are allowed.", "messages")

    def _message(self, message: ChatMessage, param: str) -> Message:
        role = "system" if message.role == "developer" else message.role
        param = f"{param}.content"
        if isinstance(message.content, str):
            return Message(role, (self._text(message.content, param),))
        if not message.content:
            raise InvalidRequest(f"`{param}` is empty.", param)
        return Message(
            role,
            tuple(
                self._part(part, role, f"{param}[{i}]") for i, part in enumerate(message.content)
            ),
        )

    def _part(self, part: ContentPart, role: str, param: str) -> TextPart | ImagePart | VideoPart:
        match part:
            case ImageUrlPart():
                return self._image(part, role, param)
            case VideoUrlPart():
                return self._video(part, role, param)
            case _:
                return self._text(part.text, param)

    def _text(self, text: str, param: str) -> TextPart:
        self.num_text_bytes += json_body.utf8_length(text, param)
        if self.num_text_bytes > self.limits.max_text_bytes:
            limit = self.limits.max_text_bytes
            raise InvalidRequest(f"At most {limit} bytes of text are allowed.", "messages")
        return TextPart(text)

    def _image(self, part: ImageUrlPart, role: str, param: str) -> ImagePart:
        if role != "user":
            raise InvalidRequest(f"Images are not allowed in messages of role '{role}'.", param)
        given = part.image_url
        url, detail = (given, None) if isinstance(given, str) else (given.url, given.detail)
        if not self._has_bytes(ExternalUrl(url, param, "image", self.limits.max_image_bytes)):
            return ImagePart(len(self.images))
        image = take_image(url, param, self.limits, self.given)
        if detail == "low":
            image = msgspec.structs.replace(image, max_side_pixels=_LOW_DETAIL_SIDE_PIXELS)
        self.images.append(image)
        return ImagePart(len(self.images) - 1)

    def _video(self, part: VideoUrlPart, role: str, param: str) -> VideoPart:
        if role != "user":
            raise InvalidRequest(f"Videos are not allowed in messages of role '{role}'.", param)
        video = part.video_url
        url = video if isinstance(video, str) else video.url
        if not self._has_bytes(ExternalUrl(url, param, "video", self.limits.max_video_bytes)):
            return VideoPart(len(self.videos))
        self.videos.append(take_video(url, param, self.limits, self.given))
        return VideoPart(len(self.videos) - 1)

    def _has_bytes(self, url: ExternalUrl) -> bool:
        """Whether the bytes of `url` are in it or given; if not, notes that they are needed."""
        if is_external(url.url):
            json_body.utf8_length(url.url, url.param)
        if url.url in self.given or not is_external(url.url):
            return True
        self.needed.setdefault(url.url, url)
        return False
