"""A `protocol.Image` or `Video` of a URL: its base64 decoded, checked and hashed.

The bytes of URLs that are not data URLs are given: whoever has the network or the disk read them.

Runs in a parsing process: the base64 and SHA-256 of a large image take tens of milliseconds. Pixels
are decoded in the engine (`prompt.media.images`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from vlm_server.api.parsing.media import data_url, image_header, video_header
from vlm_server.api.parsing.media.data_url import MediaKind
from vlm_server.api.parsing.media.external import is_external
from vlm_server.errors import PayloadTooLarge
from vlm_server.protocol import Image, Video
from vlm_server.settings import Limits

Given = Mapping[str, bytes]
"""The bytes of URLs that are not data URLs."""
_NONE: Given = {}


def parse_image(url: str, param: str, limits: Limits, given: Given = _NONE) -> Image:
    """The image at `url`, checked by its header; `content_hash` is the SHA-256 of its bytes.

    Raises InvalidImage or PayloadTooLarge, both naming `param`.
    """
    data = _bytes_of(url, param, limits.max_image_bytes, data_url.IMAGE, given)
    return _image(data, param, limits)


def parse_base64_image(base64: str, param: str, limits: Limits) -> Image:
    """The image in `base64`; otherwise as `parse_image`."""
    data = data_url.decode_base64(base64, param, limits.max_image_bytes, data_url.IMAGE)
    return _image(data, param, limits)


def parse_video(url: str, param: str, limits: Limits, given: Given = _NONE) -> Video:
    """The video at `url`, checked by its header; `content_hash` is the SHA-256 of its bytes.

    Raises InvalidVideo or PayloadTooLarge, both naming `param`.
    """
    data = _bytes_of(url, param, limits.max_video_bytes, data_url.VIDEO, given)
    header = video_header.read(data, param)
    return Video(
        data=data,
        content_hash=hashlib.sha256(data).hexdigest(),
        format=header.format,
        param=param,
        is_cut=header.is_cut,
    )


def _image(data: bytes, param: str, limits: Limits) -> Image:
    header = image_header.read(data, param, limits.max_image_pixels)
    return Image(
        data=data,
        content_hash=hashlib.sha256(data).hexdigest(),
        format=header.format,
        width=header.width,
        height=header.height,
        param=param,
    )


def _bytes_of(url: str, param: str, max_bytes: int, kind: MediaKind, given: Given) -> bytes:
    # To look up one that holds an image takes as long as decoding it.
    data = given.get(url) if is_external(url) else None
    if data is None:
        return data_url.decode(url, param, max_bytes, kind)
    if len(data) > max_bytes:
        raise PayloadTooLarge(
            f"The {kind.noun} is larger than {max_bytes} bytes (limits.max_{kind.noun}_bytes).",
            param,
        )
    return data
