"""Settings of reading pictures, videos and documents."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from vlm_server.settings.quantities import MIB, Auto


class ImageSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_decoded_pixels: Annotated[int, Meta(ge=1)] = 1_000_000_000
    """Maximum pixels to decode for a request, over all its images; what is cached does not
    count."""
    max_pixels: Annotated[Annotated[int, Meta(ge=1)] | None, Auto] = None
    """Maximum pixels of an image as the model is shown it; larger ones are scaled down. `auto` is
    the checkpoint's own maximum, which holds in any case."""
    min_tokens: Annotated[Annotated[int, Meta(ge=1, le=65536)] | None, Auto] = None
    """Minimum tokens of an image for models that scale them (the Qwen families); smaller images are
    scaled up. `auto` is the checkpoint's own; 1024 lets them point at things in small
    screenshots."""
    decode_timeout_seconds: Annotated[float, Meta(gt=0)] = 120.0
    """Time limit for decoding the images of a request; if they have less than 100 megapixels, their
    share of it, but at least a twentieth."""
    max_decode_memory_bytes: Annotated[int, Meta(ge=512 * MIB)] = 2048 * MIB
    """Maximum memory of a process that decodes images (on Linux, address space); one of
    `limits.max_image_pixels` needs up to 24 bytes a pixel."""


class DocumentSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dpi: Annotated[float, Meta(ge=10, le=1200)] = 120.0
    """Resolution at which pages are drawn, unless the request says `dpi`."""
    max_pixels: Annotated[int, Meta(ge=1)] = 4_000_000
    """Maximum pixels of a drawn page, unless the request says `max_pixels`; larger ones are drawn
    at a lower resolution. `limits.max_image_pixels` holds in any case."""
    draw_timeout_seconds: Annotated[float, Meta(gt=0)] = 30.0
    """Time limit for drawing the pages of all documents of a request, summed over its processes."""
    max_draw_memory_bytes: Annotated[int, Meta(ge=512 * MIB)] = 1536 * MIB
    """Maximum memory of a process that draws pages (on Linux, address space)."""
    max_processes: Annotated[Annotated[int, Meta(ge=1)] | None, Auto] = None
    """Maximum processes that draw pages. Each works for a document at a time, and ends after it, or
    after some seconds. `auto` is one more than there are processors, at least two and at most five,
    as far as `max_draw_memory_bytes` of each fit into a quarter of the machine's memory."""
    max_cache_bytes: Annotated[int, Meta(ge=0)] = 128 * MIB
    """Maximum size of the drawn pages that are kept for later requests; 0 keeps none."""


class VideoSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fps: Annotated[float, Meta(gt=0, le=60)] = 2.0
    """Frames sampled per second of video."""
    max_frames: Annotated[int, Meta(ge=2, le=1024)] = 64
    """Maximum frames per video; longer videos are sampled at a lower rate."""
    max_side_pixels: Annotated[int, Meta(ge=64)] = 512
    """Maximum length of both sides of a frame as the model is shown it; larger ones are scaled
    down."""
    max_frame_pixels: Annotated[int, Meta(ge=1)] = 9_000_000
    """Maximum pixels of a frame, as declared in the video."""
    max_seconds: Annotated[float, Meta(gt=0)] = 600.0
    """Maximum duration of a video."""
    decode_timeout_seconds: Annotated[float, Meta(gt=0)] = 30.0
    """Time limit for decoding one video."""
    max_decode_memory_bytes: Annotated[int, Meta(ge=512 * MIB)] = 2048 * MIB
    """Maximum memory of the process that decodes a video (on Linux, address space)."""
