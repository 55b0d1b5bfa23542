"""Features of images encoded in one call equal those of images encoded alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
import pytest

from tests.integration.harness import (
    EngineHarness,
    Part,
    Served,
    ask,
    encode_works,
)
from tests.support.active_memory import active_bytes
from tests.support.images import random_image
from tests.support.whole_run import few_of
from tests.tiny_models import FAMILIES
from vlm_server.engine.encoding import encode
from vlm_server.errors import InternalError
from vlm_server.interfaces import EncodeCall, Encoder, EncodeWork
from vlm_server.runner.encode.encoder import ImageEncoder, ImageFeatures
from vlm_server.runner.families.table import FAMILIES as ROWS

pytestmark = pytest.mark.families("tower", "batches")

TAKES_SEVERAL = [name for name in FAMILIES if ROWS[name].takes_several]
SIZES = {"small": (84, 84), "wide": (200, 140), "of whole windows": (112, 224)}
MANY: tuple[Part, ...] = (
    *("these", *(random_image(seed, 100, 60) for seed in range(10)), "and this one"),
    *(random_image(20, 60, 100), "which one?"),
)


@pytest.fixture(scope="module", params=TAKES_SEVERAL)
def served(request: pytest.FixtureRequest, load_tiny: Callable[[str], Served]) -> Served:
    return load_tiny(request.param)


def works_of(served: Served, size: tuple[int, int], count: int) -> list[EncodeWork]:
    images = [random_image(seed, *size) for seed in range(count)]
    return encode_works(served[1], ask("a", *images, "what?"))


def assert_equal(features: ImageFeatures, alone: ImageFeatures) -> None:
    """Bit by bit on a CPU, with the BLAS of MLX. Others round as the shape of a product is."""
    distance = 0.0 if mx.default_device() == mx.Device(mx.cpu) else 1e-5
    for one, other in zip(features.arrays, alone.arrays, strict=True):
        assert one.shape == other.shape
        assert np.abs(np.array(one, np.float32) - np.array(other, np.float32)).max() <= distance


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("count", few_of([2, 3, 8], [3]))
def test_batched_encode_features_equal_single_encodes(
    served: Served, size: tuple[int, int], count: int
):
    encoder, works = ImageEncoder(served[0]), works_of(served, size, count)
    assert len({work.size for work in works}) == 1
    for work, features in zip(works, encoder.encode(works), strict=True):
        (alone,) = encoder.encode([work])
        assert_equal(features, alone)


def test_batched_encode_features_own_separate_memory(served: Served):
    """Otherwise the features of one image would keep the memory of all."""
    works = works_of(served, (200, 140), 8)
    features = list(ImageEncoder(served[0]).encode(works))
    before = active_bytes()
    of_each = features[0].size_bytes
    del features[1:]
    freed = before - active_bytes()
    assert freed >= 7 * of_each - 16_384, "MLX copies nothing so small"


def test_image_with_nan_pixels_fails_alone_in_its_batch(served: Served):
    works = works_of(served, (84, 84), 3)
    pixels = [array for array in works[1].inputs.values() if array.dtype.kind == "f"]
    if not pixels:
        pytest.skip("its pixels are bytes, which are never bad")
    pixels[0][:] = np.nan
    done = encode(ImageEncoder(served[0]), works)
    assert done.seconds == math.inf
    assert [isinstance(one, InternalError) for one in done.outcomes] == [False, True, False]


class ImageCountingEncoder:
    """An encoder that notes how many images each call has."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.counts: list[int] = []

    def begin(self, works: Sequence[EncodeWork]) -> EncodeCall:
        self.counts.append(len(works))
        return self._encoder.begin(works)


def test_batched_encode_answers_equal_encodes_in_turn(served: Served):
    """The engine measures two alone, tries two at once, and then four."""
    in_turn = EngineHarness(*served)
    together = EngineHarness(*served, max_images_per_encode=8)
    together.encoder.encoder = counting = ImageCountingEncoder(together.encoder.encoder)
    together.encoder.seconds = 0.001  # however many there are: so it pays
    expected = in_turn.answer(ask("a", *MANY))
    assert together.answer(ask("a", *MANY)) == expected
    assert sorted(counting.counts) == [1, 1, 1, 2, 2, 4]
