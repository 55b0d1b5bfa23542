"""Sizes that kill the process on CUDA are avoided; what is asked for here is mere arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.integration.harness import ask
from tests.tiny_models.pictures import picture
from vlm_server.runner.loading import LoadedModel
from vlm_server.runner.preparer import MultimodalPreparer
from vlm_server.runner.windows import WindowGrid, window_grid

QWEN = WindowGrid(patch_pixels=14, merged_patches=2, window_tokens=4)


def grid_of(width: int, height: int) -> dict[str, np.ndarray]:
    return {"image_grid_thw": np.array([[1, height // 14, width // 14]])}


@pytest.mark.parametrize(
    ("size", "instead"),
    [
        ((448, 448), (420, 420)),
        ((448, 420), (420, 420)),
        ((1120, 840), (1092, 840)),
        ((896, 868), (868, 868)),
        ((112, 112), (84, 84)),
        ((420, 420), None),
        ((1092, 812), None),
    ],
)
def test_sides_of_whole_windows_lose_a_token(
    size: tuple[int, int], instead: tuple[int, int] | None
):
    smaller = QWEN.smaller_size(grid_of(*size))
    assert smaller == instead
    if smaller:
        assert QWEN.smaller_size(grid_of(*smaller)) is None


def test_only_cuda_needs_it(load_tiny: Callable[[str], tuple[LoadedModel, MultimodalPreparer]]):
    assert window_grid(load_tiny("qwen2_5_vl")[0].model) is None
    assert window_grid(load_tiny("qwen3_vl")[0].model) is None


def test_a_picture_is_processed_again_at_a_safe_size(
    load_tiny: Callable[[str], tuple[LoadedModel, MultimodalPreparer]],
):
    preparer = MultimodalPreparer(replace(load_tiny("qwen2_5_vl")[0]))
    preparer._windows = QWEN
    (span,) = preparer.prepare(ask("a", picture(1, 112, 112), "what?")).images
    assert span.inputs["image_grid_thw"].tolist() == [[1, 6, 6]]
    assert span.end - span.start == 9
