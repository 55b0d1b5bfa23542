"""The size of a request's load on the device, in each phase."""

from __future__ import annotations

import math
from typing import NamedTuple

from vlm_server.protocol import Image, Submit

_SMALL_TEXT_CHARACTERS = 16_384
"""Summed over all choices. Text up to this size, about 4,000 English tokens, does not crash an
engine, and ordinary chat must not be refused because it was running during a crash."""


class EncoderLoad(NamedTuple):
    """The load on the vision encoder: the largest image by its sides, or a video.

    Each is rounded to a power of two, so that a screenshot that is one pixel wider has the same
    shape, but a panorama and a square of equal area differ; 0 means none.
    """

    width: int
    height: int
    video_bytes: int

    def __str__(self) -> str:
        image = f"an image of about {self.width} x {self.height} pixels"
        return _and(image * bool(self.width), _videos(self.video_bytes))

    @property
    def advice(self) -> str:
        """The parts that a client can reduce."""
        return _and("smaller images" * bool(self.width), "a shorter video" * bool(self.video_bytes))


class PrefillLoad(NamedTuple):
    """The load on the language model, each part rounded to a power of two; 0 means none.

    Small text counts as none.
    """

    image_pixels: int
    video_bytes: int
    text_characters: int
    choices: int

    def __str__(self) -> str:
        return _and(
            f"images of about {self.image_pixels:,} pixels" * bool(self.image_pixels),
            _videos(self.video_bytes),
            f"about {self.text_characters:,} characters of text" * bool(self.text_characters),
            f"about {self.choices} choices" * (self.choices > 1),
        )

    @property
    def advice(self) -> str:
        """The parts that a client can reduce."""
        return _and(
            "smaller or fewer images" * bool(self.image_pixels),
            "a shorter video" * bool(self.video_bytes),
            "less text" * bool(self.text_characters),
            "a smaller `n`" * (self.choices > 1),
        )


class DiskReadLoad(NamedTuple):
    """The load of a disk read, by its whole prompt: how much of that is on disk is not known."""

    prompt: PrefillLoad

    def __str__(self) -> str:
        return str(self.prompt)

    @property
    def advice(self) -> str:
        """The parts that a client can reduce."""
        return self.prompt.advice


DeviceLoad = EncoderLoad | PrefillLoad | DiskReadLoad


class RequestShape(NamedTuple):
    """A request's loads: none for the encoder without media, none at all for small text."""

    encoding: EncoderLoad | None = None
    prefilling: PrefillLoad | None = None
    reading: DiskReadLoad | None = None

    @property
    def loads(self) -> tuple[DeviceLoad, ...]:
        return tuple(load for load in self if load is not None)


def shape_of(submit: Submit) -> RequestShape:
    """The shape of a request; requests that only count tokens have no load."""
    if submit.count_only:
        return RequestShape()
    num_characters = submit.num_characters
    is_small = num_characters * submit.sampling.n <= _SMALL_TEXT_CHARACTERS
    sides = [_sides(image) for image in submit.images]
    video_bytes = sum(len(video.data) for video in submit.videos)
    width, height = max(sides, key=math.prod, default=(0, 0))
    prefilling = PrefillLoad(
        image_pixels=_round(sum(map(math.prod, sides))),
        video_bytes=_round(video_bytes),
        text_characters=0 if is_small else _round(num_characters),
        choices=_round(submit.sampling.n),
    )
    reading = DiskReadLoad(prefilling)
    if not (sides or video_bytes):
        return RequestShape() if is_small else RequestShape(None, prefilling, reading)
    encoding = EncoderLoad(_round(width), _round(height), prefilling.video_bytes)
    return RequestShape(encoding, prefilling, reading)


def _sides(image: Image) -> tuple[int, int]:
    """Width and height after resizing for the model."""
    longest = max(image.width, image.height, 1)
    scale = min(1.0, (image.max_side_pixels or longest) / longest)
    num_pixels = max(image.width * image.height, 1) * scale**2
    if image.max_pixels is not None and num_pixels > image.max_pixels:
        scale *= math.sqrt(image.max_pixels / num_pixels)
    elif image.min_pixels is not None and num_pixels < image.min_pixels:
        scale *= math.sqrt(image.min_pixels / num_pixels)
    return max(1, round(image.width * scale)), max(1, round(image.height * scale))


def _round(value: int) -> int:
    """The nearest power of two on a logarithmic scale.

    Common sizes are powers of two themselves, so they lie in the middle of a rounding interval.
    """
    return 1 << round(math.log2(value)) if value else 0


def _videos(size_bytes: int) -> str:
    return f"videos of about {size_bytes:,} bytes" * bool(size_bytes)


def _and(*words: str) -> str:
    return ", ".join(filter(None, words))
