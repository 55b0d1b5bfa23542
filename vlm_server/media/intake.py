"""Makes a `protocol.Image` or `Video` of a data URL: its base64 decoded, checked and hashed.

Runs on an intake thread: the base64 and SHA-256 of a large image take tens of milliseconds, which
would block the event loop. Pixels are decoded in the engine (`prompt.images`).
"""

from __future__ import annotations

import hashlib

from vlm_server.media import data_url, image_header, video_header
from vlm_server.protocol import Image, Video
from vlm_server.settings import Limits


def take_image(url: str, param: str, limits: Limits) -> Image:
    """The image in `url`, checked by its header; `content_hash` is the SHA-256 of its bytes.

    Raises InvalidImage or PayloadTooLarge, both naming `param`.
    """
    data = data_url.decode(url, param, limits.max_image_bytes, data_url.IMAGE)
    header = image_header.read(data, param, limits.max_image_pixels)
    return Image(
        data=data,
        content_hash=hashlib.sha256(data).hexdigest(),
        format=header.format,
        width=header.width,
        height=header.height,
        param=param,
    )


def take_video(url: str, param: str, limits: Limits) -> Video:
    """The video in `url`, checked to be complete; `content_hash` is the SHA-256 of its bytes.

    Raises InvalidVideo or PayloadTooLarge, both naming `param`.
    """
    data = data_url.decode(url, param, limits.max_video_bytes, data_url.VIDEO)
    return Video(
        data=data,
        content_hash=hashlib.sha256(data).hexdigest(),
        format=video_header.read(data, param),
        param=param,
    )
