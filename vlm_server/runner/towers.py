"""Vision towers as few large calls that never wait for the device. Knows their layers' names.

mlx-vlm's Qwen2.5-VL tower attends to one window after the other, some 70 a layer, and reads
their lengths back from the device three times a layer; each reading hands the interpreter lock
to the decode loop. Here the layout of a picture is computed on the host from its grid, and
windows of one size are one call. The weights, and all that is done to each patch alone, stay
the loaded model's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models.qwen2_5_vl.vision import VisionModel as Qwen25Tower
from numpy.typing import NDArray

Segments = tuple[tuple[int, int], ...]
"""How a frame's patches attend: (count, patches of each), one run of equal segments each."""

_ROTARY_THETA = 10000.0


def use_fast_tower(model: Any) -> None:
    """Replace the vision tower of a loaded model by one that gives the same rows sooner.

    A tower that is not exactly a known one stays.
    """
    if type(getattr(model, "vision_tower", None)) is Qwen25Tower:
        model.vision_tower = WindowTower(model.vision_tower)


@dataclass(frozen=True, slots=True)
class WindowLayout:
    """How one frame's tokens (merged patches) are sorted so that windows lie together.

    order: (tokens,), the token in each place; rows first, as the processor has them.
    windows: (count, tokens) of each run of windows of one size: whole ones, those cut by the
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


class WindowTower(nn.Module):  # type: ignore[misc,name-defined]  # mlx.nn is not typed
    """Qwen2.5-VL's tower: attention within windows, and within whole frames in a few layers."""

    def __init__(self, tower: Qwen25Tower) -> None:
        super().__init__()
        self.patch_embed = tower.patch_embed
        self.blocks = tower.blocks
        self.merger = tower.merger
        self._frame_layers = frozenset(tower.fullatt_block_indexes)
        self._merged = tower.spatial_merge_size
        self._window_side = tower.window_size // tower.spatial_merge_size // tower.patch_size

    def __call__(
        self, pixel_values: mx.array, grid_thw: mx.array, output_hidden_states: bool | None = None
    ) -> mx.array:
        """Rows (tokens, hidden) for patches (patches, pixels) of grids (pictures, 3)."""
        rows, start = [], 0
        for frames, height, width in np.array(grid_thw).tolist():
            end = start + frames * height * width
            rows.append(self._encode(pixel_values[start:end], frames, height, width))
            start = end
        return mx.concatenate(rows)

    def _encode(self, pixel_values: mx.array, frames: int, height: int, width: int) -> mx.array:
        layout = window_layout(height // self._merged, width // self._merged, self._window_side)
        unit = self._merged**2
        patches = (layout.order[:, None] * unit + np.arange(unit, dtype=np.int32)).reshape(-1)
        windows = tuple((count, tokens * unit) for count, tokens in layout.windows)
        frame = ((1, height * width),)
        x = self.patch_embed(pixel_values).reshape(frames, height * width, -1)[:, mx.array(patches)]
        angles = patch_angles(height, width, self._merged, self.blocks[0].attn.head_dim)[patches]
        rotary = Rotary(angles)
        for number, block in enumerate(self.blocks):
            segments = frame if number in self._frame_layers else windows
            x = x + attend(block.attn, block.norm1(x), rotary, segments)
            x = x + block.mlp(block.norm2(x))
        merged: mx.array = self.merger(x).reshape(frames, len(layout.order), -1)
        return merged[:, mx.array(np.argsort(layout.order))].reshape(-1, merged.shape[-1])


def patch_angles(height: int, width: int, merged: int, head_size: int) -> NDArray[np.float32]:
    """Rotary angles (patches, head_size / 2) of one frame, in the order of its patches.

    The patches of one token, `merged` by `merged`, follow each other; half of a head's angles
    turn with the patch's row, the other half with its column.
    """
    quarter = head_size // 4
    exponents = np.arange(quarter, dtype=np.float32) / np.float32(quarter)
    frequencies = (1.0 / np.float32(_ROTARY_THETA) ** exponents).astype(np.float32)
    places = np.moveaxis(np.indices((height, width), dtype=np.float32), 0, -1)
    blocks = places.reshape(height // merged, merged, width // merged, merged, 2)
    places = blocks.transpose(0, 2, 1, 3, 4).reshape(-1, 2, 1)
    angles: NDArray[np.float32] = (places * frequencies).reshape(len(places), -1)
    return angles


class Rotary:
    """Turns the pairs (i, i + half) of each head by its patch's angle."""

    def __init__(self, angles: NDArray[np.float32]) -> None:
        shaped = angles[None, :, None, None, :]
        self._cosines, self._sines = mx.array(np.cos(shaped)), mx.array(np.sin(shaped))

    def __call__(self, x: mx.array) -> mx.array:
        """`x`: (frames, patches, any, heads, head size); turned in float32."""
        first, second = mx.split(x, 2, axis=-1)
        turned = [
            first * self._cosines - second * self._sines,
            second * self._cosines + first * self._sines,
        ]
        return mx.concatenate(turned, axis=-1).astype(x.dtype)


def attend(attention: Any, x: mx.array, rotary: Rotary, segments: Segments) -> mx.array:
    """Each patch's attention to its own segment. `x`: (frames, patches, hidden)."""
    frames, patches, _ = x.shape
    heads = attention.num_heads
    qkv = attention.qkv(x).reshape(frames, patches, 3, heads, -1)
    turned, values = rotary(qkv[:, :, :2]), qkv[:, :, 2]
    outputs, start = [], 0
    for count, length in segments:
        end = start + count * length
        queries, keys, these = (
            part[:, start:end].reshape(frames * count, length, heads, -1).transpose(0, 2, 1, 3)
            for part in (turned[:, :, 0], turned[:, :, 1], values)
        )
        output = mx.fast.scaled_dot_product_attention(queries, keys, these, scale=attention.scale)
        outputs.append(output.transpose(0, 2, 1, 3).reshape(frames, count * length, -1))
        start = end
    projected: mx.array = attention.proj(mx.concatenate(outputs, axis=1))
    return projected
