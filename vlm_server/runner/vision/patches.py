"""Keeps Qwen's images as bytes until they are on the device.

mlx-vlm's processor sorts an image into patches of float32, with each pixel twice: once for each of
the two frames of a still image. Here the bytes are sorted, an eighth of that, and converted by the
same operations on the device (`PixelValues`).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLImageProcessor
from numpy.typing import NDArray
from PIL import Image as PillowImage

from vlm_server.runner.vision.towers import PIXEL_BYTES, FrameTower


class PatchProcessor(Qwen3VLImageProcessor):  # type: ignore[misc]  # mlx_vlm is not typed
    """Replaces an image processor of exactly its parent's class.

    Instead of `pixel_values` it returns `pixel_bytes`: (patches, 3 * pixels of a patch) uint8.
    """

    def __call__(self, images: Any, **sizes: int) -> dict[str, NDArray[Any]]:
        features = super().__call__(images, **sizes)
        return {PIXEL_BYTES: features.pop("pixel_values"), **features}

    def of_image(self, pixels: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """The result of a call for an image of (height, width, 3) RGB."""
        patches, grid = self._process_one(pixels.transpose(2, 0, 1))
        return {PIXEL_BYTES: patches, "image_grid_thw": np.fromiter(grid, dtype=np.int64)[None]}

    def num_tokens(self, grid: NDArray[np.int64]) -> int:
        """The number of tokens of an image with this grid."""
        side: int = self.merge_size
        return int(grid.prod()) // side**2

    def _process_one(
        self, image: NDArray[np.uint8], **sizes: int
    ) -> tuple[NDArray[np.uint8], list[int]]:
        """`image`: (3, height, width). Returns (patches, bytes) and the grid."""
        pixels = image.transpose(1, 2, 0)
        height, width = self._resolved_size(*pixels.shape[:2], **sizes)
        if (height, width) != pixels.shape[:2]:
            resized = PillowImage.fromarray(pixels).resize(
                (width, height), PillowImage.Resampling.BICUBIC
            )
            pixels = np.asarray(resized)  # noqa: TID251  a Pillow image
        return self._in_patches(pixels), [1, height // self.patch_size, width // self.patch_size]

    def _in_patches(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """(height, width, 3) to (patches, 3 * pixels of a patch), grouped by token."""
        side, merged = self.patch_size, self.merge_size
        rows, columns = (length // side // merged for length in pixels.shape[:2])
        blocks = pixels.reshape(rows, merged, side, columns, merged, side, 3)
        return blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3 * side**2)


class PixelValues:
    """Computes on the device the pixel values that `processor` makes of an image's bytes."""

    def __init__(self, processor: Qwen3VLImageProcessor) -> None:
        self._frames = int(processor.temporal_patch_size)
        self._scale = float(processor.rescale_factor)
        self._mean = np.fromiter(processor.image_mean, dtype=np.float32)[:, None]
        self._std = np.fromiter(processor.image_std, dtype=np.float32)[:, None]

    def __call__(self, pixel_bytes: NDArray[np.uint8]) -> mx.array:
        """(patches, 3 * pixels of a patch) to (patches, 3 * frames * pixels), float32."""
        patches = mx.array(pixel_bytes).reshape(len(pixel_bytes), 3, -1).astype(mx.float32)
        values = (patches * self._scale - mx.array(self._mean)) / mx.array(self._std)
        return mx.repeat(values[:, :, None], self._frames, axis=2).reshape(len(pixel_bytes), -1)


def use_fast_patches(processor: Any, tower: FrameTower) -> None:
    """Replace the image processor if it is exactly mlx-vlm's for Qwen; any other stays.

    `tower` gets the function from bytes to pixel values.
    """
    image_processor: Any = getattr(processor, "image_processor", None)
    if (
        type(image_processor) is Qwen3VLImageProcessor
        and image_processor.do_rescale
        and image_processor.do_normalize
    ):
        tower.pixel_values = PixelValues(image_processor)
        processor.image_processor = PatchProcessor(**vars(image_processor))
