"""The messages of a request, collected within the limits, as every dialect reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from vlm_server.api.parsing import json_body
from vlm_server.api.parsing.media import documents
from vlm_server.api.parsing.media.data_url import is_frame_list
from vlm_server.api.parsing.media.documents import (
    Document,
    DrawnPages,
    PageOptions,
    PagesNeeded,
    is_pdf,
)
from vlm_server.api.parsing.media.external import (
    BytesNeeded,
    MediaUrl,
    file_name,
    is_external,
)
from vlm_server.api.parsing.media.parse import (
    Given,
    check_num_frames,
    is_video,
    parse_document,
    parse_image,
    parse_video,
)
from vlm_server.api.parsing.media.video_options import (
    NO_FIELDS,
    MediaOptions,
    VideoFields,
    fields_of_request,
    frame_sampling,
)
from vlm_server.api.parsing.parsed_request import Context
from vlm_server.errors import InvalidRequest, PayloadTooLarge
from vlm_server.protocol import ContentPart, Image, ImagePart, Message, TextPart, Video, VideoPart
from vlm_server.settings import Limits

_LOW_DETAIL_SIDE_PIXELS = 512
"""The largest side of an image with `detail` low, as OpenAI documents."""
_UNDRAWN = (TextPart(""),)
_DETAILS_FOR_GROUNDING = ("high", "original")


class DocumentSource(NamedTuple):
    """A document's `data:`, `https:` or `file:` URL, or its base64, and what the model reads first:
    its title, and what the client says of it."""

    data: str
    title: str = ""
    context: str = ""
    is_base64: bool = False


class NeedsProcess(Exception):
    """A request can't be parsed on a thread: it has bytes of media, or large earlier turns."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of a request's items, known before the first data URL is decoded."""

    messages: int
    parts: int
    images: int
    videos: int

    def check(self, limits: Limits, param: str = "messages") -> None:
        """Raises InvalidRequest for more than `limits` allow."""
        for count, limit, subject in (
            (self.messages, limits.max_messages, "messages"),
            (self.parts, limits.max_parts, "parts"),
            (self.images, limits.max_images, "images"),
            (self.videos, limits.max_videos, "videos"),
        ):
            if count > limit:
                raise InvalidRequest(
                    f"At most {limit} {subject} are allowed (limits.max_{subject}).", param
                )


@dataclass(slots=True)
class Conversation:
    """A request's messages, images, videos and documents. Its methods raise RequestError.

    `param` names the field of the request. Media whose bytes are there raise NeedsProcess if
    `on_thread`.
    """

    limits: Limits
    given: Given
    text_param: str = "messages"
    on_thread: bool = False
    pages: DrawnPages = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    videos: list[Video] = field(default_factory=list)
    min_pixels: int | None = None
    max_pixels: int | None = None
    """Bound on every image's pixels as the model sees it; `min_pixels` likewise."""
    documents: list[tuple[int, ...]] = field(default_factory=list)
    """The numbers of the shown pages of each document."""
    video_fields: VideoFields = field(default_factory=dict)
    """The request's fields about the frames of every video."""
    _needed: dict[str, MediaUrl] = field(default_factory=dict)
    _undrawn: dict[str, Document] = field(default_factory=dict)
    _num_text_bytes: int = 0
    _num_given_bytes: int = 0

    @classmethod
    def of(cls, context: Context, text_param: str = "messages") -> Conversation:
        """A conversation without messages so far, of the request in `context`."""
        return cls(context.limits, context.given, text_param, context.on_thread, context.pages)

    def set_media_options(self, request: MediaOptions) -> None:
        """Let the options of `request` hold for all images and videos. Raises InvalidRequest."""
        self.video_fields = fields_of_request(request)
        frame_sampling(self.video_fields, NO_FIELDS, is_list=True)  # checks their order
        options = request.mm_processor_kwargs
        if options is not None:
            self.min_pixels, self.max_pixels = options.min_pixels, options.max_pixels

    def add(self, message: Message, param: str) -> None:
        """Append `message`, from the field `param`."""
        self.messages.append(msgspec.structs.replace(message, param=param))

    def check_complete(self) -> None:
        """Raises BytesNeeded for URLs whose bytes were not given, and PagesNeeded for documents
        whose pages were not drawn."""
        if self._needed:
            raise BytesNeeded(list(self._needed.values()))
        if self._undrawn:
            raise PagesNeeded(list(self._undrawn.values()))

    def check_content(self, role: str, parts: Sequence[Any], param: str) -> None:
        """Raises InvalidRequest for a user's or system message without `parts`."""
        if not parts and role in ("user", "system"):
            raise InvalidRequest(f"`{param}` is empty.", param)

    # ---- parts of a message ------------------------------------------------------------

    def text(self, text: str, param: str) -> TextPart:
        """A part with `text`, counted towards `limits.max_text_bytes`."""
        self.count_text(text, param)
        return TextPart(text)

    def texts(self, texts: Iterable[tuple[str, str]]) -> tuple[ContentPart, ...]:
        """Parts of `texts`: (text, param) each."""
        return tuple(self.text(text, param) for text, param in texts)

    def count_text(self, text: str, param: str) -> str:
        """`text`, counted towards `limits.max_text_bytes`. Raises InvalidRequest beyond it."""
        self._num_text_bytes += json_body.utf8_length(text, param)
        if self._num_text_bytes > self.limits.max_text_bytes:
            limit = self.limits.max_text_bytes
            raise InvalidRequest(
                f"At most {limit} bytes of text are allowed (limits.max_text_bytes).",
                self.text_param,
            )
        return text

    def image(self, url: str, param: str, detail: str | None = None) -> ImagePart:
        """A part with the image of a `data:`, `https:` or `file:` URL, or an uploaded one.

        `detail` is OpenAI's: `low` scales down, `high` and `original` scale a small image up.
        """
        if not self._has_bytes(MediaUrl(url, param, "image", self.limits.max_image_bytes)):
            return ImagePart(len(self.images))
        self._count_given(url, param)
        image = parse_image(url, param, self.limits, self.given)
        image = msgspec.structs.replace(
            self._bounded(image),
            max_side_pixels=_LOW_DETAIL_SIDE_PIXELS if detail == "low" else None,
            for_grounding=detail in _DETAILS_FOR_GROUNDING,
        )
        self.images.append(image)
        return ImagePart(len(self.images) - 1)

    def base64_image(self, base64: str, param: str) -> ImagePart:
        """A part with the image in `base64`."""
        if self.on_thread:
            raise NeedsProcess
        self.images.append(parse_image(base64, param, self.limits, is_base64=True))
        return ImagePart(len(self.images) - 1)

    def video(
        self, url: str | Sequence[str], param: str, fields: VideoFields = NO_FIELDS
    ) -> VideoPart:
        """A part with the video of a `data:`, `https:` or `file:` URL, an uploaded one, or a list
        of images.

        fields: the part's own.
        """
        is_list = not isinstance(url, str) or is_frame_list(url)
        sampling = frame_sampling(self.video_fields, fields, is_list=is_list)
        if isinstance(url, str):
            media = [MediaUrl(url, param, "video", self.limits.max_video_bytes)]
        else:
            check_num_frames(len(url), param)
            media = [MediaUrl(each, param, "image", self.limits.max_image_bytes) for each in url]
        if not all([self._has_bytes(each) for each in media]):  # noqa: C419 - asks for all
            return VideoPart(len(self.videos))
        for each in media:
            self._count_given(each.url, param)
        video = parse_video(url, param, self.limits, self.given)
        self.videos.append(msgspec.structs.replace(video, sampling=sampling))
        return VideoPart(len(self.videos) - 1)

    def file(
        self, file_id: str, param: str, options: PageOptions, title: str = ""
    ) -> tuple[ContentPart, ...]:
        """Parts with an uploaded image, video or document, whichever the bytes are.

        A TIFF is an image, unless `options` say something of its pages.
        """
        name, limits = file_name(file_id, param), self.limits
        max_bytes = max(limits.max_image_bytes, limits.max_video_bytes, limits.max_document_bytes)
        if not self._has_bytes(MediaUrl(name, param, "image", max_bytes)):
            return (ImagePart(len(self.images)),)
        if is_pdf(self.given[name]) or options != PageOptions():
            return self.document(DocumentSource(name, title), param, options)
        if not is_video(self.given[name]):
            return (self.image(name, param),)
        num_videos = len(self.videos) + 1  # those in parts of unknown kind are not counted before
        Counts(messages=0, parts=0, images=0, videos=num_videos).check(limits, param)
        return (self.video(name, param),)

    def document(
        self, source: DocumentSource, param: str, options: PageOptions
    ) -> tuple[ContentPart, ...]:
        """Parts with the pages of a document; until they are drawn, a part in their place."""
        url = MediaUrl(source.data, param, "document", self.limits.max_document_bytes)
        if source.is_base64 and self.on_thread:
            raise NeedsProcess
        if not source.is_base64 and not self._has_bytes(url):
            return _UNDRAWN
        if not source.is_base64:
            self._count_given(source.data, param)
        document = parse_document(url, options, self.given, is_base64=source.is_base64)
        pages = self.pages.get(document.key)
        if pages is None:
            self._undrawn.setdefault(document.key, document)
            return _UNDRAWN
        number = len(self.documents)
        self.documents.append(tuple(page.number for page in pages.images))
        self._check_num_pages(param)
        heading = documents.heading(source.title, source.context)
        parts: list[ContentPart] = [TextPart(heading)] if heading else []
        for page in pages.images:
            parts += documents.page_parts(
                pages, page, len(self.images), include_text=options.include_text
            )
            image = page.to_image(number, pages.num_pages, param)
            self.images.append(self._bounded(image))
        for part in parts:
            if isinstance(part, TextPart):
                self.count_text(part.text, param)
        return tuple(parts)

    def _bounded(self, image: Image) -> Image:
        """`image`, shown with the pixels that the request allows."""
        return msgspec.structs.replace(
            image, min_pixels=self.min_pixels, max_pixels=self.max_pixels
        )

    def _check_num_pages(self, param: str) -> None:
        num_pages, limit = sum(map(len, self.documents)), self.limits.max_pages
        if num_pages > limit:
            raise InvalidRequest(
                f"The documents of the request have {num_pages} pages; at most {limit} are allowed "
                "(limits.max_pages). Ask about fewer, with `pages`.",
                param,
            )

    def _has_bytes(self, url: MediaUrl) -> bool:
        """Whether the bytes of `url` are given; if not, adds them to the needed ones."""
        is_needed = is_external(url.url) and url.url not in self.given
        if self.on_thread and not is_needed:
            raise NeedsProcess
        if is_needed:
            json_body.utf8_length(url.url, url.param)
            self._needed.setdefault(url.url, url)
        return not is_needed

    def _count_given(self, url: str, param: str) -> None:
        """Raises PayloadTooLarge if the bytes from elsewhere, with repetitions, are more than a
        body may have."""
        limit = self.limits.max_body_bytes
        self._num_given_bytes += len(self.given[url]) if is_external(url) else 0
        if self._num_given_bytes > limit:
            raise PayloadTooLarge(
                f"The media that the request refers to have more than {limit} bytes "
                "(limits.max_body_bytes), each counted as often as it occurs.",
                param,
            )
