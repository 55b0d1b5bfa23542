"""M-RoPE positions: three for each token of a prompt.

A text token has the same position three times. The tokens of an image lie in a grid of frame
groups, rows and columns, and text continues after the grid's largest position. The rule is that of
Qwen2-VL (Wang et al. 2024, section 2.1); in Qwen3-VL each frame group of a video is its own grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlm_server.interfaces.model_spec import AskPositions, MRope

_IMAGE_GRID, _VIDEO_GRID = "image_grid_thw", "video_grid_thw"
GRIDS = (_IMAGE_GRID, _VIDEO_GRID)


def media_positions(
    mrope: MRope | AskPositions,
    token_ids: NDArray[np.int32],
    token_id: int,
    grids: Mapping[str, NDArray[Any]],
) -> NDArray[np.int32]:
    """Positions of one media item's tokens, (3, tokens), counted from its first token.

    token_ids: (tokens,), from the first `token_id`, which stands for the media, to the last.
    grids: its patches, (grids, 3) of frame groups, rows and columns, by the processor's name.
    """
    if not isinstance(mrope, MRope):
        return mrope(token_ids, grids)
    positions_by_start, cursor = [], 0
    for grid in _token_grids(mrope, grids):
        start = cursor + int(np.argmax(token_ids[cursor:] == token_id))
        grid_positions = np.indices(grid, dtype=np.int32).reshape(3, -1)
        positions_by_start.append((start, grid_positions))
        cursor = start + grid_positions.shape[1]
    return prompt_positions(len(token_ids), positions_by_start)[0]


def prompt_positions(
    num_tokens: int, media: Sequence[tuple[int, NDArray[np.int32]]]
) -> tuple[NDArray[np.int32], int]:
    """Positions of a prompt, (3, tokens), and the offset from token count to the next position.

    media: the first token and the positions (`media_positions`) of each media item, in order.
    """
    positions = np.empty((3, num_tokens), dtype=np.int32)
    cursor = position = 0
    for start, item_positions in [*media, (num_tokens, np.zeros((3, 0), dtype=np.int32))]:
        positions[:, cursor:start] = np.arange(position, position + start - cursor)
        position, cursor = position + start - cursor, start + item_positions.shape[1]
        positions[:, start:cursor] = position + item_positions
        position += int(item_positions.max(initial=-1)) + 1
    return positions, position - num_tokens


def _token_grids(mrope: MRope, grids: Mapping[str, NDArray[Any]]) -> list[tuple[int, int, int]]:
    """The shape of each grid in tokens: (frame groups, rows, columns)."""
    merge_size = mrope.merge_size
    shapes: list[tuple[int, int, int]] = []
    for name in GRIDS:
        for groups, height, width in grids[name].tolist() if name in grids else ():
            shape = height // merge_size, width // merge_size
            if name == _VIDEO_GRID and mrope.splits_videos:
                shapes += [(1, *shape)] * groups
            else:
                shapes.append((groups, *shape))
    return shapes
