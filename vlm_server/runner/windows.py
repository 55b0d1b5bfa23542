"""Picture sizes that a vision tower with window attention can't take on CUDA.

Qwen2.5-VL's tower cuts a picture into square windows. mlx-vlm 0.7.10 pads a side whose length
is a whole number of windows by one more, empty window, and on CUDA the attention over an empty
window divides by zero: the process dies of SIGFPE. Measured on one H200 with bfloat16 weights:
448x448, 448x420, 896x868 and 1120x840 die, 420x420 and 1092x812 do not. Such pictures are made
smaller by one merged patch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class WindowGrid:
    """How a tower cuts pictures: pixels of a patch's side, patches merged into a token's side,
    tokens of a window's side."""

    patch_pixels: int
    merged_patches: int
    window_tokens: int

    def smaller_size(self, inputs: Mapping[str, NDArray[Any]]) -> tuple[int, int] | None:
        """The (width, height) in pixels to try instead; None if the grid in `inputs` is safe."""
        _, height, width = np.asarray(inputs["image_grid_thw"]).reshape(3).tolist()
        safe = (self._safe_side(width), self._safe_side(height))
        if safe == (width, height):
            return None
        return safe[0] * self.patch_pixels, safe[1] * self.patch_pixels

    def _safe_side(self, patches: int) -> int:
        has_empty_window = patches // self.merged_patches % self.window_tokens == 0
        return patches - self.merged_patches if has_empty_window else patches


def window_grid(model: Any) -> WindowGrid | None:
    """The grid of a model that must avoid some sizes on this device; None for all others."""
    vision: Any = getattr(model.config, "vision_config", None)
    window_pixels = getattr(vision, "window_size", None)
    if window_pixels is None or not _is_cuda():
        return None
    merged, patch = int(vision.spatial_merge_size), int(vision.patch_size)
    return WindowGrid(patch, merged, int(window_pixels) // merged // patch)


def _is_cuda() -> bool:
    return mx.default_device().type == mx.DeviceType.gpu and not mx.metal.is_available()
