"""Qwen's picture processor, done sooner and mostly without the interpreter lock. Knows numpy.

mlx-vlm's own sorts a picture into patches in float32, each pixel twice: once for each of the
two frames that a still picture stands for. Here the bytes are sorted, then made into numbers by
the same operations, and doubled at the end: the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLImageProcessor
from numpy.typing import NDArray
from PIL import Image as PillowImage


class PatchProcessor(Qwen3VLImageProcessor):  # type: ignore[misc]  # mlx_vlm is not typed
    """Takes the place of an image processor of exactly its parent's class."""

    def _process_one(
        self, image: NDArray[np.uint8], **sizes: int
    ) -> tuple[NDArray[np.float32], list[int]]:
        """`image`: (3, height, width). Returns (patches, values) and the grid."""
        if image.dtype != np.uint8 or not (self.do_rescale and self.do_normalize):
            made: tuple[NDArray[np.float32], list[int]] = super()._process_one(image, **sizes)
            return made
        pixels = image.transpose(1, 2, 0)
        height, width = self._resolved_size(*pixels.shape[:2], **sizes)
        if (height, width) != pixels.shape[:2]:
            resized = PillowImage.fromarray(pixels).resize(
                (width, height), PillowImage.Resampling.BICUBIC
            )
            pixels = np.asarray(resized)
        values = self._normalized(self._in_patches(pixels))
        frames = np.repeat(values[:, :, None], self.temporal_patch_size, axis=2)
        grid = [1, height // self.patch_size, width // self.patch_size]
        return frames.reshape(len(values), -1), grid

    def _in_patches(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """(height, width, 3) to (patches, 3, pixels of a patch); those of a token together."""
        side, merged = self.patch_size, self.merge_size
        rows, columns = (length // side // merged for length in pixels.shape[:2])
        blocks = pixels.reshape(rows, merged, side, columns, merged, side, 3)
        return blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, side**2)

    def _normalized(self, patches: NDArray[np.uint8]) -> NDArray[np.float32]:
        values = patches.astype(np.float32)
        values *= self.rescale_factor
        values -= np.array(self.image_mean, dtype=np.float32)[:, None]
        values /= np.array(self.image_std, dtype=np.float32)[:, None]
        return values


def use_fast_patches(processor: Any) -> None:
    """Replace the image processor if it is exactly mlx-vlm's for Qwen; any other stays."""
    own = getattr(processor, "image_processor", None)
    if type(own) is Qwen3VLImageProcessor:
        processor.image_processor = PatchProcessor(**vars(own))
