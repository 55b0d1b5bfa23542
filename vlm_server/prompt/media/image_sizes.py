"""The size at which an image is shown to the model, if a request or the settings ask for one.

In families of dynamic resolution, processors resize images by a rule (`PixelRule`). This module
applies the rule first, with narrower bounds, so that the processor keeps the size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image as PillowImage

from vlm_server.errors import InvalidRequest
from vlm_server.interfaces.model_spec import PixelRule
from vlm_server.protocol import Image
from vlm_server.settings import ImageSettings

_MAX_ASPECT = 200
"""The largest aspect ratio that processors accept."""
MIN_PIXELS_PARAM = "mm_processor_kwargs.min_pixels"


@dataclass(frozen=True, slots=True)
class PixelBounds:
    """Width times height of an image as the model sees it; `max_pixels` None is no bound."""

    min_pixels: int
    max_pixels: int | None


class ImageSizes:
    """The sizes of one model's images. Thread-safe."""

    def __init__(self, rule: PixelRule | None, settings: ImageSettings) -> None:
        """`rule`: of the model's processor; None if its sizes are fixed, or not known."""
        self._rule = rule
        self._own_bounds = (
            PixelBounds(rule.min_pixels, rule.max_pixels) if rule else PixelBounds(0, None)
        )
        """The processor's own bounds."""
        self._ceiling = settings.max_pixels
        self._min_tokens = settings.min_tokens or 0

    def check(self, image: Image) -> None:
        """Raises InvalidRequest for a size that this model can't show."""
        self.check_min_pixels(image.min_pixels)

    def check_min_pixels(self, min_pixels: int | None) -> None:
        """Raises InvalidRequest if images are to be made larger, and this model does not do it."""
        if min_pixels is not None and self._rule is None:
            raise InvalidRequest(
                "This model's processor has sizes of its own: an image can't be made larger.",
                MIN_PIXELS_PARAM,
            )

    def bounds(self, image: Image) -> PixelBounds | None:
        """The bounds to which `image` is scaled before processing; None if it is not scaled."""
        bounds, size = self._bounds_for(image), (image.width, image.height)
        if bounds == self._own_bounds:
            return None
        if image.max_side_pixels is not None and max(size) > image.max_side_pixels:
            return bounds  # the decoder will know its size
        return None if self._size(size, bounds) == self._processor_size(size) else bounds

    def scale(self, pixels: NDArray[np.uint8], bounds: PixelBounds | None) -> NDArray[np.uint8]:
        """An upright image, (height, width, 3), at the size that `bounds` ask for."""
        height, width = pixels.shape[:2]
        size = width, height
        target = size if bounds is None else self._size(size, bounds)
        if target == size:
            return pixels
        image = PillowImage.fromarray(pixels)
        return np.asarray(image.resize(target, PillowImage.Resampling.BICUBIC))

    def _processor_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """The size to which the processor itself scales an image."""
        if self._rule is None or max(size) > _MAX_ASPECT * min(size):
            return size
        return _smart_resize(size, self._rule)

    def _bounds_for(self, image: Image) -> PixelBounds:
        own_bounds = self._own_bounds
        ceilings = (own_bounds.max_pixels, self._ceiling, image.max_pixels)
        max_pixels = min((ceiling for ceiling in ceilings if ceiling is not None), default=None)
        if max_pixels is None or self._rule is None:
            return PixelBounds(0, max_pixels)
        max_pixels = max(max_pixels, own_bounds.min_pixels)
        min_pixels = max(own_bounds.min_pixels, self._min_pixels(image, self._rule))
        return PixelBounds(min(min_pixels, max_pixels), max_pixels)

    def _min_pixels(self, image: Image, rule: PixelRule) -> int:
        """The least pixels wanted; 0 for a request for a small image (`detail` low)."""
        if image.min_pixels is not None:
            return image.min_pixels
        if image.max_side_pixels is not None:
            return 0
        grounding = rule.grounding_tokens if image.for_grounding else 0
        if grounding > rule.max_tokens:
            grounding = 0  # the checkpoint was made for smaller images
        return max(grounding, self._min_tokens) * rule.factor**2

    def _size(self, size: tuple[int, int], bounds: PixelBounds) -> tuple[int, int]:
        if max(size) > _MAX_ASPECT * min(size):
            return size
        if bounds.max_pixels is None:
            return size
        if (rule := self._rule) is not None:
            pixel_bounds = bounds.min_pixels, bounds.max_pixels
            return fit(size, rule.factor, *pixel_bounds, floor_pixels=rule.min_pixels)
        if math.prod(size) <= bounds.max_pixels:
            return size
        scale = math.sqrt(bounds.max_pixels / math.prod(size))
        return max(1, math.floor(size[0] * scale)), max(1, math.floor(size[1] * scale))


def fit(
    size: tuple[int, int],
    factor: int,
    min_pixels: int,
    max_pixels: int,
    *,
    floor_pixels: int = 0,
) -> tuple[int, int]:
    """Width and height in multiples of `factor`, within the bounds, and about the same aspect.

    The rule of Qwen2-VL's processor (`smart_resize`), but that `max_pixels` always holds. The
    result has at least `floor_pixels`: a processor would enlarge a smaller one, perhaps beyond
    `max_pixels`.
    """
    width, height = (round(side / factor) for side in size)
    low, high = math.ceil(floor_pixels / factor**2), max_pixels // factor**2
    if width * height < math.ceil(min_pixels / factor**2):
        scale = math.sqrt(min_pixels / math.prod(size)) / factor
        width, height = (math.ceil(side * scale) for side in size)
    if width * height > high:
        scale = math.sqrt(max_pixels / math.prod(size)) / factor
        width, height = (max(1, math.floor(side * scale)) for side in size)
    width, height = min(width, height * _MAX_ASPECT), min(height, width * _MAX_ASPECT)
    if not low <= width * height <= high:
        width, height = _nearest(size, low, high) or (width, height)
    return width * factor, height * factor


def _smart_resize(size: tuple[int, int], rule: PixelRule) -> tuple[int, int]:
    """The size by Qwen2-VL's processor, which now and then exceeds its own bound."""
    factor = rule.factor
    width, height = (round(side / factor) * factor for side in size)
    if width * height > rule.max_pixels:
        scale = math.sqrt(rule.max_pixels / math.prod(size)) / factor
        width, height = (max(1, math.floor(side * scale)) * factor for side in size)
    elif width * height < rule.min_pixels:
        scale = math.sqrt(rule.min_pixels / math.prod(size)) / factor
        width, height = (math.ceil(side * scale) * factor for side in size)
    return width, height


def _nearest(size: tuple[int, int], min_pixels: int, max_pixels: int) -> tuple[int, int] | None:
    """The sides of the aspect nearest to `size` with a product within the bounds, if any."""
    aspect = max(size) / min(size)
    candidates: list[tuple[float, int, int]] = []
    for short in range(1, math.isqrt(max(max_pixels, 0)) + 1):
        min_long = max(short, math.ceil(min_pixels / short))
        max_long = min(max_pixels // short, short * _MAX_ASPECT)
        if min_long <= max_long:
            long = min(max(round(short * aspect), min_long), max_long)
            candidates.append((abs(math.log(long / short / aspect)), long, short))
    if not candidates:
        return None
    _, long, short = min(candidates)
    return (long, short) if size[0] >= size[1] else (short, long)
