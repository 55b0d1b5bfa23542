"""An image, video or document of a URL: its base64 decoded, checked and hashed.

Runs in a parsing process: the base64 and SHA-256 of a large image take tens of milliseconds. Pixels
are decoded in the engine (`prompt.media.images`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from vlm_server.api.parsing.media import data_url, documents, image_header, video_header
from vlm_server.api.parsing.media.documents import Document, PageOptions
from vlm_server.api.parsing.media.external import MediaUrl, is_external
from vlm_server.api.parsing.media.formats import MP4, guess_format
from vlm_server.errors import InvalidImage, InvalidVideo
from vlm_server.protocol import FRAME_LIST, Image, Video
from vlm_server.settings import Limits

Given = Mapping[str, bytes]
"""The bytes of `https:` and `file:` URLs and of uploaded files, which the front has read."""
_NONE: Given = {}
_VIDEOS = frozenset({MP4, "WebM", "Matroska", "AVI", "EBML"})
MAX_FRAMES = 1024
"""The most images in a list of frames: as many as `video.max_frames` may allow."""


def parse_image(
    url: str, param: str, limits: Limits, contents: Given = _NONE, *, is_base64: bool = False
) -> Image:
    """The image at `url`, checked by its header; `content_hash` is the SHA-256 of its bytes.

    With `is_base64`, `url` is plain base64. Raises InvalidImage or PayloadTooLarge, both naming
    `param`.
    """
    media = MediaUrl(url, param, "image", limits.max_image_bytes)
    data = data_url.decode_base64(media) if is_base64 else _bytes_of(media, contents)
    header = image_header.read(data, param, limits.max_image_pixels)
    return Image(
        data=data,
        content_hash=hashlib.sha256(data).hexdigest(),
        format=header.format,
        width=header.width,
        height=header.height,
        param=param,
    )


def parse_video(
    url: str | Sequence[str], param: str, limits: Limits, contents: Given = _NONE
) -> Video:
    """The video at `url`, or of the images at several; otherwise as `parse_image`.

    Raises InvalidVideo or PayloadTooLarge.
    """
    media = MediaUrl(url if isinstance(url, str) else "", param, "video", limits.max_video_bytes)
    if not isinstance(url, str):
        return _parse_frames(url, media, limits, contents)
    if data_url.is_frame_list(url):
        frames = data_url.split_frames(media, MAX_FRAMES)
        return _parse_frames(frames, media, limits, contents, are_base64=True)
    data = _bytes_of(media, contents)
    header = video_header.read(data, param)
    return Video(
        data=data,
        content_hash=hashlib.sha256(data).hexdigest(),
        format=header.format,
        param=param,
        is_cut=header.is_cut,
    )


def is_video(data: bytes) -> bool:
    """Whether `data`, whose kind its field does not say, begins like a video. A GIF is an image."""
    return guess_format(data) in _VIDEOS


def parse_document(
    source: MediaUrl, options: PageOptions, contents: Given = _NONE, *, is_base64: bool = False
) -> Document:
    """The document at `source`, its format known; otherwise as `parse_image`.

    Raises InvalidDocument or PayloadTooLarge.
    """
    data = data_url.decode_base64(source) if is_base64 else _bytes_of(source, contents)
    return documents.read_header(data, source, options)


def check_num_frames(count: int, param: str) -> None:
    """Raises InvalidVideo for a list of frames that is empty or too long."""
    if not 0 < count <= MAX_FRAMES:
        message = f"A list of frames has 1 to {MAX_FRAMES} images; this one has {count}."
        raise InvalidVideo(message, param)


def _parse_frames(
    urls: Sequence[str],
    media: MediaUrl,
    limits: Limits,
    contents: Given,
    *,
    are_base64: bool = False,
) -> Video:
    """The video whose frames are the images at `urls`. Raises InvalidVideo or PayloadTooLarge."""
    check_num_frames(len(urls), media.param)
    frames, num_bytes = list[Image](), 0
    for number, url in enumerate(urls):
        try:
            frame = parse_image(url, media.param, limits, contents, is_base64=are_base64)
        except InvalidImage as error:
            raise media.invalid(f"Frame {number} of the video: {error.message}") from None
        num_bytes += len(frame.data)
        if num_bytes > media.max_bytes:
            raise media.too_large()
        frames.append(msgspec.structs.replace(frame, content_hash="", param=""))
        if (frame.width, frame.height) != (frames[0].width, frames[0].height):
            raise media.invalid(
                f"Frame {number} of the video has {frame.width}x{frame.height} pixels, and those "
                f"before it {frames[0].width}x{frames[0].height}: they must be equal."
            )
    data = msgspec.msgpack.encode(frames)
    return Video(data, hashlib.sha256(data).hexdigest(), FRAME_LIST, media.param)


def _bytes_of(media: MediaUrl, contents: Given) -> bytes:
    # Looking up a data URL takes as long as decoding it.
    data = contents.get(media.url) if is_external(media.url) else None
    if data is None:
        return data_url.decode(media)
    if len(data) > media.max_bytes:
        raise media.too_large()
    return data
