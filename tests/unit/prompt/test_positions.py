"""M-RoPE positions equal those by hand; tests/integration/test_positions.py compares mlx-vlm's."""

from __future__ import annotations

import numpy as np

from vlm_server.interfaces.model_spec import MRope
from vlm_server.prompt.positions import media_positions, prompt_positions

WHOLE, SPLIT = MRope(2, splits_videos=False), MRope(2, splits_videos=True)
TEXT, MEDIA = 1, 9


def positions(
    rule: MRope, ids: list[int], name: str, grid: tuple[int, int, int]
) -> list[list[int]]:
    token_ids = np.array(ids, dtype=np.int32)
    return media_positions(rule, token_ids, MEDIA, {name: np.array([grid])}).tolist()


def test_image_positions_form_grid_of_merged_patches():
    found = positions(WHOLE, [MEDIA] * 6, "image_grid_thw", (1, 4, 6))
    assert found == [[0] * 6, [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]]


def test_whole_video_positions_count_frame_groups():
    found = positions(WHOLE, [MEDIA] * 4, "video_grid_thw", (2, 2, 4))
    assert found == [[0, 0, 1, 1], [0] * 4, [0, 1, 0, 1]]


def test_split_video_positions_have_grid_per_frame_group():
    ids = [MEDIA, MEDIA, TEXT, MEDIA, MEDIA]
    found = positions(SPLIT, ids, "video_grid_thw", (2, 2, 4))
    assert found == [[0, 0, 2, 3, 3], [0, 0, 2, 3, 3], [0, 1, 2, 3, 4]]


def test_unchecked_family_positions_come_from_its_model():
    own_positions = np.full((3, 2), 5, dtype=np.int32)
    token_ids = np.array([MEDIA, MEDIA], dtype=np.int32)
    assert media_positions(lambda ids, grids: own_positions, token_ids, MEDIA, {}) is own_positions


def test_text_positions_continue_after_largest_media_position():
    image = np.indices((1, 2, 2), dtype=np.int32).reshape(3, -1)
    found, delta = prompt_positions(7, [(1, image)])
    assert found.tolist() == [[0, 1, 1, 1, 1, 3, 4], [0, 1, 1, 2, 2, 3, 4], [0, 1, 2, 1, 2, 3, 4]]
    assert delta == -2


def test_text_only_positions_count_up():
    found, delta = prompt_positions(3, [])
    assert found.tolist() == [[0, 1, 2]] * 3
    assert delta == 0
