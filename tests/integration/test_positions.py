"""M-RoPE positions are those of mlx-vlm's `get_rope_index`, for any grid."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integration.harness import Served
from vlm_server.interfaces.model_spec import MRope
from vlm_server.prompt.positions import media_positions, prompt_positions
from vlm_server.runner.families.family import MRopeRule
from vlm_server.runner.families.table import FAMILIES
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.loading.probe import ask_positions, media_start

pytestmark = pytest.mark.families("rope")

Grid = tuple[int, int, int]

WITH_MROPE = sorted(
    name
    for name, family in FAMILIES.items()
    if family.mrope not in (None, MRopeRule.IN_ORDER) and family.reads_images and not family.embeds
)
TEXT = 7
SIDES = st.integers(1, 9)
SHAPES = st.tuples(SIDES, SIDES)
QUICK = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=WITH_MROPE, scope="module")
def loaded(request: pytest.FixtureRequest, load_tiny: Callable[[str], Served]) -> LoadedModel:
    return load_tiny(request.param)[0]


def grid_of(loaded: LoadedModel, groups: int, shape: tuple[int, int]) -> Grid:
    """A grid in patches; `shape` is in tokens."""
    rule = loaded.spec.mrope
    assert isinstance(rule, MRope)
    return groups, shape[0] * rule.merge_size, shape[1] * rule.merge_size


def media_ids(
    loaded: LoadedModel, token_id: int, groups: int, shape: tuple[int, int], gap: int
) -> list[int]:
    """The token ids of media as the processor writes them.

    There is text between the groups where the family has some.
    """
    begin = media_start(loaded.model.config)
    own = [token_id] * (shape[0] * shape[1])
    rule = loaded.spec.mrope
    assert isinstance(rule, MRope)
    if token_id == loaded.spec.image_token_id or not rule.splits_videos:
        return own * groups
    return own + [*[TEXT] * gap, begin, *own] * (groups - 1)


def check(loaded: LoadedModel, ids: list[int], token_id: int, grid: Grid, name: str) -> None:
    token_ids, grids = np.array(ids, dtype=np.int32), {name: np.array([grid])}
    assert loaded.spec.mrope is not None
    ours = media_positions(loaded.spec.mrope, token_ids, token_id, grids)
    theirs = ask_positions(loaded.language_model)(token_ids, grids)
    assert ours.dtype == np.int32
    np.testing.assert_array_equal(ours, theirs)


@QUICK
@given(shape=SHAPES)
def test_mrope_positions_of_image_equal_mlx_vlms(loaded: LoadedModel, shape: tuple[int, int]):
    token_id = loaded.spec.image_token_id
    ids = media_ids(loaded, token_id, 1, shape, 0)
    check(loaded, ids, token_id, grid_of(loaded, 1, shape), "image_grid_thw")


@QUICK
@given(shape=SHAPES, groups=st.integers(1, 6), gap=st.integers(0, 9))
def test_mrope_positions_of_video_equal_mlx_vlms(
    loaded: LoadedModel, shape: tuple[int, int], groups: int, gap: int
):
    token_id = loaded.spec.video_token_id
    if token_id is None:
        pytest.skip("its videos are shown as images")
    ids = media_ids(loaded, token_id, groups, shape, gap)
    check(loaded, ids, token_id, grid_of(loaded, groups, shape), "video_grid_thw")


@QUICK
@given(shapes=st.lists(st.tuples(SHAPES, st.integers(1, 5)), max_size=4))
def test_mrope_positions_of_several_images_equal_mlx_vlms(
    loaded: LoadedModel, shapes: list[tuple[tuple[int, int], int]]
):
    """Text of any length before, between and after them."""
    begin, token_id = media_start(loaded.model.config), loaded.spec.image_token_id
    rule = loaded.spec.mrope
    assert rule is not None
    ids: list[int] = [TEXT]
    placed, grids = [], []
    for shape, gap in shapes:
        grid = grid_of(loaded, 1, shape)
        own = media_ids(loaded, token_id, 1, shape, 0)
        ids += [*[TEXT] * gap, begin]
        image = {"image_grid_thw": np.array([grid])}
        positions = media_positions(rule, np.array(own, dtype=np.int32), token_id, image)
        placed.append((len(ids), positions))
        ids += [*own, TEXT]
        grids.append(grid)
    theirs, deltas = loaded.language_model.get_rope_index(
        mx.array([ids]), **({"image_grid_thw": mx.array(grids)} if grids else {})
    )
    ours, delta = prompt_positions(len(ids), placed)
    theirs = np.array(theirs).reshape(-1, len(ids))
    np.testing.assert_array_equal(ours, np.broadcast_to(theirs, ours.shape))
    assert delta == int(np.array(deltas).reshape(-1)[0])
