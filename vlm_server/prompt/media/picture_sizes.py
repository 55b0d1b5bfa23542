"""How large a picture is shown to the model, where a request or the settings ask for a size.

Families of dynamic resolution make whole tokens of a picture of any size, by a rule that their
processors apply (`PixelRule`). Here it is applied first, with narrower bounds: what the processor
gets then is a size that it keeps. A picture that nobody asks anything of is left to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from PIL import Image as PillowImage

from vlm_server.errors import InvalidRequest
from vlm_server.host_model import PixelRule
from vlm_server.protocol import Image
from vlm_server.settings import Image as ImageSettings

_MOST_ASPECT = 200
"""Beyond it processors refuse a picture."""
MIN_PIXELS_PARAM = "mm_processor_kwargs.min_pixels"


@dataclass(frozen=True, slots=True)
class PixelBounds:
    """Width times height of a picture as the model sees it; `max_pixels` None is no bound."""

    min_pixels: int
    max_pixels: int | None


class PictureSizes:
    """The sizes of one model's pictures. Thread-safe."""

    def __init__(self, rule: PixelRule | None, settings: ImageSettings) -> None:
        """`rule`: of the model's processor; None if its sizes are fixed, or not known."""
        self._rule = rule
        self._ceiling = settings.max_pixels or None
        self._min_tokens = settings.min_tokens

    def check(self, image: Image) -> None:
        """Raises InvalidRequest for a wish that this model can't obey."""
        if image.min_pixels is not None and self._rule is None:
            raise InvalidRequest(
                "This model's processor has sizes of its own: a picture can't be made larger.",
                MIN_PIXELS_PARAM,
            )

    def bounds(self, image: Image) -> PixelBounds | None:
        """What `image` is scaled to before the processor gets it; None if it is not."""
        bounds = self._asked(image)
        own = self._own
        if bounds == own:
            return None
        if image.max_side_pixels is not None and max(image.width, image.height) > (
            image.max_side_pixels
        ):
            return bounds  # its size after that is the decoder's to know
        size = image.width, image.height
        return None if self._size(size, bounds) == self._size(size, own) else bounds

    def scale(self, picture: PillowImage.Image, bounds: PixelBounds | None) -> PillowImage.Image:
        """`picture`, upright, at the size that `bounds` ask for."""
        size = picture.size if bounds is None else self._size(picture.size, bounds)
        if size == picture.size:
            return picture
        return picture.resize(size, PillowImage.Resampling.BICUBIC)

    @property
    def _own(self) -> PixelBounds:
        """What the processor applies itself."""
        if self._rule is None:
            return PixelBounds(0, None)
        return PixelBounds(self._rule.min_pixels, self._rule.max_pixels)

    def _asked(self, image: Image) -> PixelBounds:
        own = self._own
        ceilings = (own.max_pixels, self._ceiling, image.max_pixels)
        most = min((each for each in ceilings if each is not None), default=None)
        if most is None or self._rule is None:
            return PixelBounds(0, most)
        most = max(most, own.min_pixels)
        least = max(own.min_pixels, self._least(image, self._rule))
        return PixelBounds(min(least, most), most)

    def _least(self, image: Image, rule: PixelRule) -> int:
        """The pixels that are wanted at least; what asks for few (`detail` low) wants none."""
        if image.min_pixels is not None:
            return image.min_pixels
        if image.max_side_pixels is not None:
            return 0
        grounding = rule.grounding_tokens if image.for_grounding else 0
        if grounding > rule.max_tokens:
            grounding = 0  # the checkpoint was made for smaller pictures
        return max(grounding, self._min_tokens) * rule.factor**2

    def _size(self, size: tuple[int, int], bounds: PixelBounds) -> tuple[int, int]:
        if max(size) > _MOST_ASPECT * min(size):
            return size
        if self._rule is not None:
            assert bounds.max_pixels is not None
            return fit(size, self._rule.factor, bounds.min_pixels, bounds.max_pixels)
        if bounds.max_pixels is None or math.prod(size) <= bounds.max_pixels:
            return size
        scale = math.sqrt(bounds.max_pixels / math.prod(size))
        return max(1, math.floor(size[0] * scale)), max(1, math.floor(size[1] * scale))


def fit(size: tuple[int, int], factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Width and height in multiples of `factor`, with so many pixels and about the same aspect.

    The rule of Qwen2-VL's processor (`smart_resize`), but that `max_pixels` holds where there is no
    size between the bounds.
    """
    width, height = (round(side / factor) * factor for side in size)
    if width * height < min_pixels:
        scale = math.sqrt(min_pixels / math.prod(size))
        width, height = (math.ceil(side * scale / factor) * factor for side in size)
    if width * height > max_pixels:
        scale = math.sqrt(max_pixels / math.prod(size))
        width, height = (max(1, math.floor(side * scale / factor)) * factor for side in size)
    return width, height
