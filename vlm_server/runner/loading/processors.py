"""mlx-vlm's processors: text and pixels in, numpy arrays out."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.prompt_utils import get_chat_template
from mlx_vlm.utils import VideoMetadata, prepare_inputs
from numpy.typing import NDArray
from PIL import Image as PillowImage

from vlm_server.interfaces.model_spec import PixelRule, ProcessedMedia, StandIn
from vlm_server.runner.device.arrays import to_numpy
from vlm_server.runner.vision.patches import PatchProcessor

PillowImage.core.set_blocks_max(1)  # type: ignore[attr-defined]  # Pillow's, but not typed
"""Pillow keeps one block, of at most 16 MB, for the next image: mapping a new one takes 3 ms."""

_NOT_FOR_THE_TOWER = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
_MILLISECONDS = 1000
_PROBE_SIZE = (64, 64)
_ONE_IMAGE = 4
"""Dimensions of the pixels of an image that is not cut: (1, channels, height, width)."""


_Around = tuple[NDArray[np.int32], NDArray[np.int32]]
"""The ids of the text before and after an image's tokens."""


class ModelProcessor:
    """One model's processor, as `ModelSpec` has it. Thread-safe."""

    def __init__(
        self, processor: Any, image_token_id: int | None, stand_in: StandIn | None = None
    ) -> None:
        self._processor = processor
        _encode_one_by_one(getattr(processor, "tokenizer", processor))
        self._image_token_id = image_token_id
        self._stand_in = stand_in
        self._around = dict[str, _Around | None]()
        """By placeholder; None if an image's tokens do not follow from its grid."""

    def image(self, pixels: NDArray[np.uint8], placeholder: str) -> ProcessedMedia:
        around = self._around.get(placeholder)
        if around is None:
            processed = self._process(placeholder, images=[PillowImage.fromarray(pixels)])
            if placeholder not in self._around:
                self._around[placeholder] = self._around_of(processed)
        else:
            processed = self._by_grid(pixels, around)
        return replace(processed, size=self._size(processed, pixels))

    def expands(self, placeholder: str) -> bool:
        """Whether the processor expands `placeholder` to an image's tokens."""
        try:
            processed = self._process(placeholder, images=[PillowImage.new("RGB", _PROBE_SIZE)])
        except Exception:  # noqa: BLE001 - processors raise any exception
            return False
        return self._image_token_id in processed.token_ids

    def video(
        self, frames: NDArray[np.uint8], seconds: Sequence[float], placeholder: str
    ) -> ProcessedMedia:
        """Timestamps are exact to a millisecond: the video is given as 1,000 frames a second."""
        indices = [round(time * _MILLISECONDS) for time in seconds]
        metadata = VideoMetadata(indices[-1] + 1, float(_MILLISECONDS), indices)
        processed = self._process(placeholder, videos=[frames], video_metadata=[metadata])
        _, rows, columns = (int(number) for number in processed.inputs["video_grid_thw"][0])
        processor = getattr(self._processor, "video_processor", None)
        side = int((processor or self._processor.image_processor).patch_size)
        return replace(processed, size=(columns * side, rows * side))

    def write_prompt(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool
    ) -> Any:
        """Used only without a chat template, which mlx-vlm would render without a sandbox."""
        return get_chat_template(
            self._processor, list(messages), add_generation_prompt=add_generation_prompt
        )

    def _size(self, processed: ProcessedMedia, pixels: NDArray[np.uint8]) -> tuple[int, int]:
        """Width and height of the resized image; of the original if it was cut into tiles."""
        inputs = processed.inputs
        if "image_grid_thw" in inputs:
            _, rows, columns = (int(number) for number in inputs["image_grid_thw"].reshape(-1)[:3])
            side = int(self._processor.image_processor.patch_size)
            return columns * side, rows * side
        if "image_sizes" in inputs:
            height, width = (int(number) for number in inputs["image_sizes"].reshape(-1)[:2])
            return width, height
        values = inputs.get("pixel_values")
        if values is not None and values.ndim == _ONE_IMAGE and len(values) == 1:
            return values.shape[3], values.shape[2]
        return pixels.shape[1], pixels.shape[0]

    def _around_of(self, processed: ProcessedMedia) -> _Around | None:
        """The text around an image's tokens, if their number follows from its grid alone."""
        image_processor = getattr(self._processor, "image_processor", None)
        places = np.flatnonzero(processed.token_ids == self._image_token_id)
        if (
            not isinstance(image_processor, PatchProcessor)
            or self._stand_in is not None
            or not len(places)
        ):
            return None
        first, end = int(places[0]), int(places[-1]) + 1
        if (
            not len(places)
            == end - first
            == image_processor.num_tokens(processed.inputs["image_grid_thw"])
        ):
            return None
        return processed.token_ids[:first], processed.token_ids[end:]

    def _by_grid(self, pixels: NDArray[np.uint8], around: _Around) -> ProcessedMedia:
        """The result of `_process`, without tokenizing thousands of equal image tokens."""
        image_processor: PatchProcessor = self._processor.image_processor
        inputs = image_processor.of_image(pixels)
        count = image_processor.num_tokens(inputs["image_grid_thw"])
        tokens, (before, after) = np.full(count, self._image_token_id, dtype=np.int32), around
        return ProcessedMedia(np.concatenate([before, tokens, after]), inputs)

    def _process(self, placeholder: str, **media: Any) -> ProcessedMedia:
        arrays = prepare_inputs(
            self._processor, prompts=placeholder, image_token_index=self._image_token_id, **media
        )
        inputs = {
            name: to_numpy(array) if isinstance(array, mx.array) else np.stack(array)
            for name, array in arrays.items()
            if isinstance(array, mx.array | list) and name not in _NOT_FOR_THE_TOWER
        }
        _check_not_cut(inputs)
        ids = to_numpy(mx.array(arrays["input_ids"])).astype(np.int32).reshape(-1)
        return ProcessedMedia(self._with_stand_in(ids), inputs)

    def _with_stand_in(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        if (stand_in := self._stand_in) is None:
            return ids
        is_image = ids == stand_in.model_id
        counts = np.where(is_image, stand_in.num_tokens, 1)
        return np.repeat(np.where(is_image, stand_in.token_id, ids), counts).astype(np.int32)


def _encode_one_by_one(tokenizer: Any) -> None:
    """Let one thread at a time encode text, since each call first sets the padding of all.

    The rest of a processor keeps no state between calls, and so needs no lock.
    """
    encode, lock = tokenizer._encode_plus, threading.RLock()

    def encode_alone(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return encode(*args, **kwargs)

    tokenizer._encode_plus = encode_alone


def _check_not_cut(inputs: Mapping[str, NDArray[Any]]) -> None:
    """Raises ValueError if an image has more patches than its rows have room for."""
    shapes = inputs.get("spatial_shapes")
    if shapes is not None and shapes.prod(axis=1).max() > inputs["pixel_values"].shape[1]:
        raise ValueError("an image of this shape has more patches than the model takes")


def pixel_rule(processor: Any, grounding_tokens: int) -> PixelRule | None:
    """The pixel rule of mlx-vlm's processors of the Qwen families; None for any other."""
    image_processor = getattr(processor, "image_processor", None)
    names = ("patch_size", "merge_size", "min_pixels", "max_pixels")
    values = [getattr(image_processor, name, None) for name in names]
    if not all(isinstance(value, int) and value > 0 for value in values):
        return None
    patch_size, merge_size, min_pixels, max_pixels = (int(value or 0) for value in values)
    return PixelRule(patch_size * merge_size, min_pixels, max_pixels, grounding_tokens)
