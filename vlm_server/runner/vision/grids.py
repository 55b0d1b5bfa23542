"""The positions of an image's patches and tokens: index arithmetic on the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Grid:
    """Patches of one image or video."""

    frames: int
    height: int
    width: int

    @property
    def frame_patches(self) -> int:
        return self.height * self.width

    @property
    def patches(self) -> int:
        return self.frames * self.frame_patches


def join_frames(grids: Iterable[Grid]) -> list[Grid]:
    """`grids`, with runs of one height and width joined into one grid of all their frames."""
    runs = groupby(grids, key=lambda grid: (grid.height, grid.width))
    return [Grid(sum(grid.frames for grid in run), *side) for side, run in runs]


def patch_positions(height: int, width: int, merged: int) -> NDArray[np.int32]:
    """(row, column) of each patch of a frame, (patches, 2), in the processor's order.

    The patches of one token, `merged` by `merged`, follow each other.
    """
    positions = np.moveaxis(np.indices((height, width), dtype=np.int32), 0, -1)
    tokens = positions.reshape(height // merged, merged, width // merged, merged, 2)
    return tokens.transpose(0, 2, 1, 3, 4).reshape(-1, 2)


@dataclass(frozen=True, slots=True)
class WindowLayout:
    """The order of one frame's tokens (merged patches) by windows.

    order: (tokens,), the row-major numbers of the tokens in that order.
    windows: (count, tokens) of each run of windows of one size: whole ones, those cut off by the
    right edge, by the bottom edge, by both. No window is empty.
    """

    order: NDArray[np.int32]
    windows: tuple[tuple[int, int], ...]


def window_layout(rows: int, columns: int, side: int) -> WindowLayout:
    """The windows of `side` by `side` tokens in a frame of `rows` by `columns`."""
    tokens = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    whole_rows, whole_columns = rows - rows % side, columns - columns % side
    order, windows = [], []
    for area in (
        tokens[:whole_rows, :whole_columns],
        tokens[:whole_rows, whole_columns:],
        tokens[whole_rows:, :whole_columns],
        tokens[whole_rows:, whole_columns:],
    ):
        if area.size:
            height, width = min(side, area.shape[0]), min(side, area.shape[1])
            cut = area.reshape(area.shape[0] // height, height, area.shape[1] // width, width)
            order.append(cut.transpose(0, 2, 1, 3).reshape(-1))
            windows.append((area.size // (height * width), height * width))
    return WindowLayout(np.concatenate(order), tuple(windows))


def interpolation(
    grid: Grid, patches: NDArray[np.int32], side: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The interpolation of a frame's patches (patches, 2) among `side` by `side` learned positions.

    Returns the indices (4, patches) of the four around each patch, and their bilinear weights;
    the outermost patches lie on the outermost positions.
    """
    rows = np.linspace(0, side - 1, grid.height, dtype=np.float32)[patches[:, 0]]
    columns = np.linspace(0, side - 1, grid.width, dtype=np.float32)[patches[:, 1]]
    top, left = rows.astype(np.int32), columns.astype(np.int32)
    bottom, right = np.minimum(top + 1, side - 1), np.minimum(left + 1, side - 1)
    down, across = rows - top, columns - left
    indices = [top * side + left, top * side + right, bottom * side + left, bottom * side + right]
    weights = [
        (1 - down) * (1 - across),
        (1 - down) * across,
        down * (1 - across),
        down * across,
    ]
    return np.stack(indices), np.stack(weights)
