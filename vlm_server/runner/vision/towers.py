"""Vision towers of Qwen and GLM as few large calls that never wait for the GPU.

mlx-vlm's towers of Qwen read segment lengths back from the device three times a layer, and
positions before the first; each read hands the interpreter lock to the decode loop. Qwen2.5-VL's
also attends to one window after the other, some 70 a layer. Here all of that is computed on the
host from an image's grid, and windows of one size are one call. The modules that hold the weights
stay the loaded model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models import (
    glm4v,
    glm4v_moe,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_5,
    qwen3_5_moe,
    qwen3_omni_moe,
    qwen3_vl,
    qwen3_vl_moe,
)
from numpy.typing import NDArray

from vlm_server.runner.backends.interface import Backend
from vlm_server.runner.backends.rope import Rope, image_rope
from vlm_server.runner.vision.attention import Segments, attend
from vlm_server.runner.vision.grids import (
    Grid,
    interpolation,
    join_frames,
    patch_positions,
    window_layout,
)

PIXEL_BYTES = "pixel_bytes"
"""Name of a `PatchProcessor`'s output in place of `pixel_values`."""

_MAX_COMPILED = 16


def fast_tower_of(tower: Any) -> type[FrameTower] | None:
    """Our tower for a vision tower of exactly a known class of mlx-vlm; else None."""
    return _TOWERS.get(type(tower))


@dataclass(frozen=True, slots=True)
class TowerRows:
    """The output of a vision tower.

    rows: (tokens, hidden). deepstack: (tokens, hidden) for each layer that has any. parts: the
    layers' outputs in order, if the encode is to be computed in turns.
    """

    rows: mx.array
    deepstack: list[mx.array]
    parts: list[mx.array] = field(default_factory=list)

    def split(self, count: int) -> list[TowerRows]:
        """Copies of the rows of each of `count` images of one size."""

        def part(array: mx.array, number: int) -> mx.array:
            rows = array.shape[0] // count
            return mx.contiguous(array[number * rows : (number + 1) * rows])

        return [
            TowerRows(part(self.rows, number), [part(layer, number) for layer in self.deepstack])
            for number in range(count)
        ]


_Arrays = tuple[mx.array, list[mx.array], list[mx.array]]
"""The rows, deepstack and parts of `TowerRows`, as `mx.compile` takes them."""


class FrameTower(nn.Module):  # type: ignore[misc,name-defined]  # mlx.nn is not typed
    """Qwen2-VL's tower: every patch attends to its whole frame, in every layer."""

    def __init__(self, tower: Any, backend: Backend) -> None:
        super().__init__()
        self._backend = backend
        self.patch_embed = tower.patch_embed
        self.blocks = tower.blocks
        self.merger = tower.merger
        self.spatial_merge_size = int(tower.spatial_merge_size)
        self._function_of = lru_cache(_MAX_COMPILED)(self._new_function)
        self.pixel_values: Callable[[NDArray[np.uint8]], mx.array] | None = None
        """Converts an image's bytes to pixel values, if its processor returns bytes."""

    def encode_inputs(self, inputs: Mapping[str, NDArray[Any]]) -> TowerRows:
        """The rows of an image or video, lazy, from its processor's output."""
        if "video_grid_thw" in inputs:
            return self.encode(mx.array(inputs["pixel_values_videos"]), inputs["video_grid_thw"])
        if PIXEL_BYTES not in inputs:
            return self.encode(mx.array(inputs["pixel_values"]), inputs["image_grid_thw"])
        assert self.pixel_values is not None
        return self.encode(self.pixel_values(inputs[PIXEL_BYTES]), inputs["image_grid_thw"])

    def encode(self, pixel_values: mx.array, grid_thw: NDArray[np.integer[Any]]) -> TowerRows:
        """The rows of images or videos, lazy: `pixel_values` (patches, pixels).

        Neighbours of one height and width are encoded as frames of one video: frames do not attend
        to each other.
        """
        outputs, start = [], 0
        for grid in join_frames(Grid(*row) for row in grid_thw.tolist()):
            outputs.append(self._function_of(grid)(pixel_values[start : start + grid.patches]))
            start += grid.patches
        rows, deepstack, parts = zip(*outputs, strict=True)
        layers = [mx.concatenate(list(layer)) for layer in zip(*deepstack, strict=True)]
        return TowerRows(mx.concatenate(list(rows)), layers, list(chain(*parts)))

    def _new_function(self, grid: Grid) -> Callable[[mx.array], _Arrays]:
        """`_encode_one` for one grid, with its positions; compiled where that pays."""

        def run(patches: mx.array) -> _Arrays:
            return self._encode_one(patches, grid)

        return mx.compile(run) if self._backend.compiles_towers else run

    def _encode_one(self, pixel_values: mx.array, grid: Grid) -> _Arrays:
        positions = patch_positions(grid.height, grid.width, self.spatial_merge_size)
        x = self._embed(pixel_values, grid, positions)
        rope, segments = self._rope(positions), Segments(((1, grid.frame_patches),))
        deepstack, parts = [], []
        for number, block in enumerate(self.blocks):
            x = self._layer(block, x, rope, segments)
            deepstack += self._deepstack(number, x)
            parts += [x] if self._backend.encodes_in_turns else []
        return self._merge(_flat(x)), deepstack, parts

    def _embed(self, pixel_values: mx.array, grid: Grid, positions: NDArray[np.int32]) -> mx.array:
        """The input of the first layer, (frames, patches, hidden)."""
        return self._patches(pixel_values).reshape(grid.frames, grid.frame_patches, -1)

    def _patches(self, pixel_values: mx.array) -> mx.array:
        """(patches, pixels) to (patches, hidden): a convolution whose steps do not overlap."""
        proj = self.patch_embed.proj
        weight = mx.moveaxis(proj.weight, -1, 1).reshape(proj.weight.shape[0], -1)
        rows: mx.array = pixel_values.astype(weight.dtype) @ weight.T
        return rows + proj.bias if "bias" in proj else rows

    def _rope(self, positions: NDArray[np.int32]) -> Rope:
        return image_rope(positions, self.blocks[0].attn.head_dim)

    def _layer(self, block: Any, x: mx.array, rope: Rope, segments: Segments) -> mx.array:
        x = x + attend(block.attn, block.norm1(x), rope, segments, self._backend)
        return x + block.mlp(block.norm2(x))  # type: ignore[no-any-return]

    def _deepstack(self, layer: int, x: mx.array) -> list[mx.array]:
        """Rows for the text's layers from the result `x` of layer `layer`; none for most layers."""
        return []

    def _merge(self, x: mx.array) -> mx.array:
        """(patches, hidden) to (tokens, the text's hidden)."""
        return self.merger(x)  # type: ignore[no-any-return]


class DeepstackTower(FrameTower):
    """Qwen3-VL's tower: also learned positions, and rows for the text's first layers."""

    def __init__(self, tower: Any, backend: Backend) -> None:
        super().__init__(tower, backend)
        self.pos_embed = tower.pos_embed
        self.deepstack_merger_list = tower.deepstack_merger_list
        self._positions_side = int(tower.num_grid_per_side)
        self._deepstack_layers = list(tower.deepstack_visual_indexes)

    def _embed(self, pixel_values: mx.array, grid: Grid, positions: NDArray[np.int32]) -> mx.array:
        indices, weights = interpolation(grid, positions, self._positions_side)
        corners = self.pos_embed(mx.array(indices))
        learned = (corners * mx.array(weights)[..., None].astype(corners.dtype)).sum(axis=0)
        embedded: mx.array = super()._embed(pixel_values, grid, positions) + learned
        return embedded

    def _deepstack(self, layer: int, x: mx.array) -> list[mx.array]:
        if layer not in self._deepstack_layers:
            return []
        return [self.deepstack_merger_list[self._deepstack_layers.index(layer)](_flat(x))]


class WindowTower(FrameTower):
    """Qwen2.5-VL's tower: attention within windows, and within whole frames in a few layers."""

    def __init__(self, tower: Any, backend: Backend) -> None:
        super().__init__(tower, backend)
        self._frame_layers = frozenset(tower.fullatt_block_indexes)
        self._window_side = tower.window_size // tower.spatial_merge_size // tower.patch_size
        for block in self.blocks:
            self._backend.prepare_mlp(block.mlp)

    def _encode_one(self, pixel_values: mx.array, grid: Grid) -> _Arrays:
        """Tokens are sorted by window before the first layer, and back after the last."""
        merged, unit = self.spatial_merge_size, self.spatial_merge_size**2
        layout = window_layout(grid.height // merged, grid.width // merged, self._window_side)
        order = (layout.order[:, None] * unit + np.arange(unit, dtype=np.int32)).reshape(-1)
        positions = patch_positions(grid.height, grid.width, merged)[order]
        x = self._embed(pixel_values, grid, positions)[:, mx.array(order)]
        rope, frame = self._rope(positions), Segments(((1, grid.frame_patches),))
        runs = tuple((count, tokens * unit) for count, tokens in layout.windows)
        blocks = self._backend.segment_blocks(runs, self.blocks[0].attn.head_dim, x.dtype)
        windows = Segments(runs, blocks)
        parts = []
        for number, block in enumerate(self.blocks):
            segments = frame if number in self._frame_layers else windows
            x = self._layer(block, x, rope, segments)
            parts += [x] if self._backend.encodes_in_turns else []
        rows = self.merger(_flat(x)).reshape(grid.frames, len(layout.order), -1)
        return _flat(rows[:, mx.array(np.argsort(layout.order))]), [], parts

    def _layer(self, block: Any, x: mx.array, rope: Rope, segments: Segments) -> mx.array:
        x = x + attend(block.attn, block.norm1(x), rope, segments, self._backend)
        return x + self._backend.gated_mlp(block.mlp, block.norm2(x))


class GlmTower(FrameTower):
    """GLM-4V's tower: also learned positions, and patches merged by a convolution.

    mlx-vlm 0.7.10 splits every call into three parts, two of them empty for one image.
    """

    def __init__(self, tower: Any, backend: Backend) -> None:
        super().__init__(tower, backend)
        self.embeddings = tower.embeddings
        self.post_conv_layernorm = tower.post_conv_layernorm
        self.post_layernorm = tower.post_layernorm
        self.downsample = tower.downsample

    def _embed(self, pixel_values: mx.array, grid: Grid, positions: NDArray[np.int32]) -> mx.array:
        x = self.post_conv_layernorm(self._patches(pixel_values))
        rows, columns = mx.array(np.tile(positions, (grid.frames, 1)).T)
        shape = mx.array([[grid.frames, grid.height, grid.width]])
        embedded: mx.array = self.embeddings(x, [grid.patches], shape, rows, columns)
        return embedded.reshape(grid.frames, grid.frame_patches, -1)

    def _merge(self, x: mx.array) -> mx.array:
        tokens = self.post_layernorm(x).reshape(
            -1, self.spatial_merge_size, self.spatial_merge_size, x.shape[-1]
        )
        return super()._merge(_flat(self.downsample(tokens)))


def _flat(x: mx.array) -> mx.array:
    """(frames, patches, hidden) to (frames * patches, hidden)."""
    return x.reshape(-1, x.shape[-1])


_TOWERS: dict[type, type[FrameTower]] = {
    qwen2_vl.VisionModel: FrameTower,
    qwen2_5_vl.VisionModel: WindowTower,
    qwen3_vl.VisionModel: DeepstackTower,
    qwen3_vl_moe.VisionModel: DeepstackTower,
    qwen3_omni_moe.VisionModel: DeepstackTower,
    qwen3_5.VisionModel: DeepstackTower,
    qwen3_5_moe.VisionModel: DeepstackTower,
    glm4v.VisionModel: GlmTower,
    glm4v_moe.VisionModel: GlmTower,
}
