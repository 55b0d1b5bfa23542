"""One picture or one video through the model's processor. Knows mlx-vlm's call; knows no prompt.

The processor sees the placeholder and one medium, so what is made of it depends on nothing
else. It says which tokens stand for the medium, and which text goes around them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.utils import VideoMetadata, prepare_inputs
from numpy.typing import NDArray
from PIL import Image as PillowImage

from vlm_server.errors import InvalidImage, InvalidVideo
from vlm_server.prompt.positions import has_positions, medium_positions
from vlm_server.runner.model.load import LoadedModel
from vlm_server.video.clip import Clip

_GRIDS = ("image_grid_thw", "video_grid_thw")
_UNIT_TOKENS = 1024
"""Most tokens of a video that are encoded at once, unless two frames have more."""
_NOT_OF_THE_MEDIUM = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
_MILLISECONDS = 1000


logger = logging.getLogger(__name__)


Inputs = Mapping[str, NDArray[Any]]
"""What the vision tower takes of one unit."""


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """How a medium stands in a prompt: all but its pixels.

    Its `token_ids` run from the first of `token_id` to the last; `prefix` and `suffix` are the
    text around them. `positions`, (3, tokens), count from the first of them, for families with
    M-RoPE. `units` are the tokens, start and end, that are encoded at once.
    """

    token_id: int
    token_ids: NDArray[np.int32]
    prefix: str
    suffix: str
    positions: NDArray[np.int32] | None
    units: tuple[tuple[int, int], ...]

    @property
    def size_bytes(self) -> int:
        """About what it takes of memory."""
        arrays = (self.token_ids, self.positions)
        return sum(a.nbytes for a in arrays if a is not None) + 100 * len(self.units) + 1000


@dataclass(frozen=True, slots=True)
class Processed:
    """A medium's layout, and the inputs of each of its units."""

    layout: TokenLayout
    inputs: tuple[Inputs, ...]

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for unit in self.inputs for array in unit.values())


def process_picture(
    loaded: LoadedModel, placeholder: str, picture: PillowImage.Image, param: str
) -> Processed:
    """Raises InvalidImage, naming `param`, for a picture that the processor can't take."""
    try:
        made = prepare_inputs(
            loaded.processor,
            images=[picture],
            prompts=placeholder,
            image_token_index=loaded.image_token_id,
        )
        whole = _processed(loaded, made, loaded.image_token_id)
    except Exception as error:
        logger.warning("the processor failed on a picture", exc_info=True)
        size = f"{picture.width}x{picture.height}"
        raise InvalidImage(
            f"the model's processor can't take this picture of {size} pixels", param
        ) from error
    if whole is None:
        raise InvalidImage("the model's processor made nothing of this picture", param)
    return whole


def process_video(
    loaded: LoadedModel, token_id: int, placeholder: str, clip: Clip, param: str
) -> Processed:
    """Raises InvalidVideo, naming `param`, for frames that the processor can't take."""
    try:
        made = prepare_inputs(
            loaded.processor,
            videos=[clip.frames],
            video_metadata=[_metadata(clip)],
            prompts=placeholder,
            image_token_index=loaded.image_token_id,
        )
        whole = _processed(loaded, made, token_id)
    except Exception as error:
        logger.warning("the processor failed on a video", exc_info=True)
        height, width = clip.frames.shape[1:3]
        raise InvalidVideo(
            f"the model's processor can't take this video of {width}x{height} pixels", param
        ) from error
    if whole is None:
        raise InvalidVideo("the model's processor made nothing of this video", param)
    return _in_units(whole)


def _metadata(clip: Clip) -> VideoMetadata:
    """Each frame by its millisecond, as if the video had a thousand frames a second."""
    indices = [round(seconds * _MILLISECONDS) for seconds in clip.seconds]
    return VideoMetadata(indices[-1] + 1, float(_MILLISECONDS), indices)


def _processed(loaded: LoadedModel, made: dict[str, Any], token_id: int) -> Processed | None:
    """What the processor made, as one unit; None if no token stands for the medium."""
    token_ids = np.array(made["input_ids"], dtype=np.int32).reshape(-1)
    places = np.flatnonzero(token_ids == token_id)
    if not len(places):
        return None
    first, last = int(places[0]), int(places[-1]) + 1
    inputs = {
        key: np.array(value)
        for key, value in made.items()
        if isinstance(value, mx.array) and key not in _NOT_OF_THE_MEDIUM
    }
    grids = {name: inputs[name] for name in _GRIDS if name in inputs}
    language_model = loaded.language_model
    layout = TokenLayout(
        token_id=token_id,
        token_ids=token_ids[first:last],
        prefix=_text_of(loaded, token_ids[:first]),
        suffix=_text_of(loaded, token_ids[last:]),
        positions=medium_positions(language_model, token_ids[first:last], grids)
        if has_positions(language_model)
        else None,
        units=((0, last - first),),
    )
    return Processed(layout, (inputs,))


def _text_of(loaded: LoadedModel, token_ids: NDArray[np.int32]) -> str:
    kept = [int(i) for i in token_ids if int(i) != loaded.tokenizer.bos_token_id]
    return str(loaded.backend.decode(kept, skip_special_tokens=False))


def _in_units(video: Processed) -> Processed:
    """`video` in units of bounded size, each of whole groups of frames.

    Qwen's towers let a group of frames see itself alone, so that encoding one after the other
    gives the same rows.
    """
    layout, (whole,) = video.layout, video.inputs
    pixels, grid = whole["pixel_values_videos"], whole["video_grid_thw"]
    groups, height, width = (int(side) for side in grid.reshape(3))
    places = np.flatnonzero(layout.token_ids == layout.token_id).reshape(groups, -1)
    step = max(1, _UNIT_TOKENS // places.shape[1])
    units, inputs = list[tuple[int, int]](), list[Inputs]()
    for first in range(0, groups, step):
        last = min(first + step, groups)
        units.append((int(places[first, 0]), int(places[last - 1, -1]) + 1))
        inputs.append(
            {
                "pixel_values_videos": pixels[first * height * width : last * height * width],
                "video_grid_thw": np.array([[last - first, height, width]], dtype=grid.dtype),
            }
        )
    return Processed(replace(layout, units=tuple(units)), tuple(inputs))
