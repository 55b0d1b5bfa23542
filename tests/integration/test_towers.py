"""A tower of ours gives the rows that mlx-vlm's own gives, whatever the grid."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm.models.qwen2_5_vl.vision import VisionModel

from vlm_server.runner.loading import LoadedModel
from vlm_server.runner.preparer import MultimodalPreparer
from vlm_server.runner.towers import WindowTower, use_fast_tower, window_layout

LoadTiny = Callable[[str], tuple[LoadedModel, MultimodalPreparer]]
LoadMlxVlms = Callable[[str], LoadedModel]

GRIDS = {
    "one token": (1, 2, 2),
    "less than a window": (1, 4, 6),
    "one window": (1, 8, 8),
    "whole windows": (1, 16, 24),
    "whole windows down, not across": (1, 16, 10),
    "whole windows across, not down": (1, 14, 8),
    "cut windows at both edges": (1, 30, 22),
    "tall": (1, 60, 2),
    "wide": (1, 4, 50),
    "frames": (3, 10, 12),
    "frames of whole windows": (2, 8, 8),
}


def pixels(*grids: tuple[int, int, int]) -> mx.array:
    patches = sum(frames * height * width for frames, height, width in grids)
    values = np.random.default_rng(patches).normal(size=(patches, 3 * 2 * 14 * 14))
    return mx.array(values.astype(np.float32))


def distance(a: mx.array, b: mx.array) -> float:
    assert a.shape == b.shape
    return float(mx.abs(a - b).max().item())


# ---- Qwen2.5-VL ----------------------------------------------------------------------


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_rows_are_mlx_vlms(
    load_tiny: LoadTiny, load_mlx_vlms: LoadMlxVlms, grid: tuple[int, int, int]
):
    ours = load_tiny("qwen2_5_vl")[0].model.vision_tower
    own = load_mlx_vlms("qwen2_5_vl").model.vision_tower
    assert (type(ours), type(own)) == (WindowTower, VisionModel)
    patches, grid_thw = pixels(grid), mx.array([grid])
    assert distance(ours(patches, grid_thw), own(patches, grid_thw)) < 1e-5


def test_rows_of_several_pictures_are_mlx_vlms(load_tiny: LoadTiny, load_mlx_vlms: LoadMlxVlms):
    grids = [(1, 10, 12), (2, 4, 6), (1, 8, 8)]
    ours = load_tiny("qwen2_5_vl")[0].model.vision_tower
    own = load_mlx_vlms("qwen2_5_vl").model.vision_tower
    patches = pixels(*grids)
    assert distance(ours(patches, mx.array(grids)), own(patches, mx.array(grids))) < 1e-5


def test_bfloat16_rows_are_near_mlx_vlms(load_mlx_vlms: LoadMlxVlms):
    """As near as mlx-vlm's own are to those in float32."""
    own = load_mlx_vlms("qwen2_5_vl").model.vision_tower
    half = VisionModel(own.config)
    half.update(own.parameters())
    half.set_dtype(mx.bfloat16)
    grid_thw, exact = mx.array([[1, 30, 22]]), pixels((1, 30, 22))
    patches = exact.astype(mx.bfloat16)
    rows, theirs = WindowTower(half)(patches, grid_thw), half(patches, grid_thw)
    assert rows.dtype == theirs.dtype == mx.bfloat16
    precise = own(exact, grid_thw)
    assert distance(rows, precise) < 1.5 * distance(theirs, precise)


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (9, 8), (8, 11), (7, 6), (3, 2), (1, 13)])
def test_every_token_lies_in_one_window(rows: int, columns: int):
    layout = window_layout(rows, columns, 4)
    assert sorted(layout.order.tolist()) == list(range(rows * columns))
    start = 0
    for count, length in layout.windows:
        assert count * length > 0
        for tokens in layout.order[start : start + count * length].reshape(count, length):
            assert len({(token // columns // 4, token % columns // 4) for token in tokens}) == 1
        start += count * length
    assert start == rows * columns
    assert len(layout.windows) <= 4


# ---- towers that stay ----------------------------------------------------------------


def test_a_tower_that_is_not_known_stays(load_mlx_vlms: LoadMlxVlms):
    class OtherTower(VisionModel):
        pass

    class OtherModel:
        vision_tower = OtherTower(load_mlx_vlms("qwen2_5_vl").model.config.vision_config)

    model = OtherModel()
    use_fast_tower(model)
    assert type(model.vision_tower) is OtherTower
