"""An image is scaled within its bounds to a size that the model's processor keeps."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from vlm_server.interfaces.model_spec import PixelRule
from vlm_server.prompt.media.image_sizes import ImageSizes, fit
from vlm_server.protocol import Image
from vlm_server.settings import ImageSettings

SIDES = st.integers(8, 5000) | st.sampled_from([8, 41, 8200, 5600])
PIXELS = st.none() | st.floats(5, 24).map(lambda exponent: int(2**exponent))


def smart_resize(size: tuple[int, int], factor: int, least: int, most: int) -> tuple[int, int]:
    """Qwen's processors' resizing of (width, height)."""
    width, height = (round(side / factor) * factor for side in size)
    if width * height > most:
        scale = math.sqrt(math.prod(size) / most)
        width, height = (max(factor, math.floor(s / scale / factor) * factor) for s in size)
    elif width * height < least:
        scale = math.sqrt(least / math.prod(size))
        width, height = (math.ceil(s * scale / factor) * factor for s in size)
    return width, height


def scaled(size: tuple[int, int], rule: PixelRule, image: Image) -> tuple[int, int]:
    """The size to which a processor with this rule scales the already fitted `image`."""
    bounds = ImageSizes(rule, ImageSettings()).bounds(image)
    if bounds is not None:
        assert bounds.max_pixels is not None
        expected = bounds.min_pixels, bounds.max_pixels
        size = fit(size, rule.factor, *expected, floor_pixels=rule.min_pixels)
        assert max(size) <= 200 * min(size)
    shown = smart_resize(size, rule.factor, rule.min_pixels, rule.max_pixels)
    assert bounds is None or shown == size, "the processor keeps it"
    return shown


@given(
    st.tuples(SIDES, SIDES),
    st.sampled_from([28, 32]),
    st.sampled_from([1, 4, 64, 256]),
    st.sampled_from([512, 1280, 16384]),
    PIXELS,
    PIXELS,
)
@example((444, 139), 28, 4, 16384, None, 3136)
@example((24, 473), 28, 256, 1280, 573_978, 233_095)
@example((8200, 41), 28, 4, 16384, None, 300_000)
@example((41, 8200), 28, 4, 16384, 1 << 20, None)
@example((41, 8200), 28, 1, 512, None, 185_363)
def test_fitted_size_is_kept_by_processor_within_bounds(
    size: tuple[int, int],
    factor: int,
    least: int,
    most: int,
    min_pixels: int | None,
    max_pixels: int | None,
):
    assume(max(size) <= 200 * min(size))
    rule = PixelRule(factor, least * factor**2, most * factor**2)
    image = Image(b"", "h", "PNG", *size, "p", min_pixels=min_pixels, max_pixels=max_pixels)
    width, height = scaled(size, rule, image)
    if max_pixels is not None:
        assert width * height <= max(max_pixels, rule.min_pixels)


@pytest.mark.parametrize(
    ("size", "bounds", "expected"),
    [
        ((444, 139), (3136, 3136), (112, 28)),
        ((139, 444), (3136, 3136), (28, 112)),
        ((1000, 1000), (13_328, 13_328), (112, 112)),
        ((640, 362), (3136, 12845056), (644, 364)),
        ((1920, 1080), (3136, 1_000_000), (1316, 728)),
    ],
)
def test_fit_gives_expected_sizes_within_bounds(
    size: tuple[int, int], bounds: tuple[int, int], expected: tuple[int, int]
):
    assert fit(size, 28, *bounds, floor_pixels=3136) == expected
