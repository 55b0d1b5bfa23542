"""The model's processor, run on a placeholder and one image or one video at a time."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vlm_server.cache.prompt_key import inputs_hash
from vlm_server.errors import InvalidImage, InvalidVideo
from vlm_server.interfaces import MediaInputs
from vlm_server.interfaces.model_spec import ModelSpec, ProcessedMedia
from vlm_server.prompt.media.decoders import Clip, SampledFrames
from vlm_server.prompt.positions import GRIDS, media_positions

_MAX_REASON_CHARS = 200

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """The tokens and positions of a media item in a prompt: all but its pixels.

    token_ids: (tokens,), from the first `token_id` to the last, with the frame around them. prefix,
    suffix: the text around these. positions: (3, tokens) of M-RoPE, from the first token on. units:
    start and end of the tokens of each unit, which is encoded alone. unit_hashes: of the encoder's
    inputs of each unit; none for an image, which is one unit. size: of an image or a video's frames
    as the model sees them. sampled: the frames of a video.
    """

    token_id: int
    token_ids: NDArray[np.int32]
    prefix: str
    suffix: str
    positions: NDArray[np.int32] | None
    units: tuple[tuple[int, int], ...]
    unit_hashes: tuple[str, ...] = ()
    size: tuple[int, int] | None = None
    sampled: SampledFrames | None = None

    @property
    def size_bytes(self) -> int:
        """Its approximate memory."""
        arrays = (self.token_ids, self.positions)
        return sum(a.nbytes for a in arrays if a is not None) + 250 * len(self.units) + 1000


@dataclass(frozen=True, slots=True)
class Processed:
    """A media item's token layout, and the inputs of each of its units."""

    layout: TokenLayout
    inputs: tuple[MediaInputs, ...]

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for unit in self.inputs for array in unit.values())


def process_image(
    spec: ModelSpec, placeholder: str, pixels: NDArray[np.uint8], param: str
) -> Processed:
    """Process an image of (height, width, 3) RGB. Raises InvalidImage, naming `param`."""
    assert spec.image_token_id is not None
    height, width = pixels.shape[:2]
    description = f"image of {width}x{height} pixels"
    with _named_failures(description, InvalidImage, param):
        return _as_one_unit(spec, spec.process_image(pixels, placeholder), spec.image_token_id)


def process_video(
    spec: ModelSpec, token_id: int, placeholder: str, clip: Clip, param: str, salt: str
) -> Processed:
    """Process the frames of a video. Raises InvalidVideo, naming `param`.

    Requests with different `salt` share no features.
    """
    height, width = clip.frames.shape[1:3]
    description = f"video of {width}x{height} pixels"
    with _named_failures(description, InvalidVideo, param):
        media = spec.process_video(clip.frames, clip.seconds, placeholder)
        whole = _as_one_unit(spec, media, token_id)
    video = _in_units(whole, salt)
    return replace(video, layout=replace(video.layout, sampled=clip.sampled))


@contextmanager
def _named_failures(
    description: str, refusal: type[InvalidImage | InvalidVideo], param: str
) -> Iterator[None]:
    """Raises `refusal` for any exception in the block.

    The exception is logged in one line only, since clients can send any number of bad images.
    """
    try:
        yield
    except Exception as error:
        logger.info("the processor failed on a %s: %s", description, _in_one_line(error))
        logger.debug("the processor failed", exc_info=error)
        message = f"the model's processor can't take this {description}{_reason(error)}"
        raise refusal(message, param) from error


def _reason(error: Exception) -> str:
    """The reason for the client: processors raise ValueError for bad input."""
    reason = _in_one_line(error) if isinstance(error, ValueError) else ""
    return f": {reason}" if reason else ""


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:_MAX_REASON_CHARS]


def _as_one_unit(spec: ModelSpec, media: ProcessedMedia, token_id: int) -> Processed:
    """The processor's output as one unit. Raises ValueError without a token of the media item."""
    if token_id not in media.token_ids:
        raise ValueError("it returns nothing for it")
    positions = np.flatnonzero(np.isin(media.token_ids, (token_id, *spec.frame_token_ids)))
    first, end = int(positions[0]), int(positions[-1]) + 1
    token_ids = media.token_ids[first:end]
    grids = {name: media.inputs[name] for name in GRIDS if name in media.inputs}
    layout = TokenLayout(
        token_id=token_id,
        token_ids=token_ids,
        prefix=_text_of(spec, media.token_ids[:first]),
        suffix=_text_of(spec, media.token_ids[end:]),
        positions=None
        if spec.mrope is None
        else media_positions(spec.mrope, token_ids, token_id, grids),
        units=((0, end - first),),
        size=media.size,
    )
    return Processed(layout, (media.inputs,))


def _text_of(spec: ModelSpec, token_ids: NDArray[np.int32]) -> str:
    ids = [int(i) for i in token_ids if int(i) != spec.tokenizer.bos_token_id]
    return str(spec.backend.decode(ids, skip_special_tokens=False))


def _in_units(video: Processed, salt: str) -> Processed:
    """`video` with a unit for each frame group.

    In Qwen's towers a frame group attends to itself alone, so units give the same features, which
    depend on nothing but their own pixels: videos share those of equal frames.
    """
    layout, (arrays,) = video.layout, video.inputs
    pixels, grid = arrays["pixel_values_videos"], arrays["video_grid_thw"]
    groups, height, width = (int(side) for side in grid.reshape(3))
    tokens = np.flatnonzero(layout.token_ids == layout.token_id).reshape(groups, -1)
    grid_of_a_group = np.array([[1, height, width]], dtype=grid.dtype)
    inputs = tuple(
        {"pixel_values_videos": patches, "video_grid_thw": grid_of_a_group}
        for patches in pixels.reshape(groups, height * width, -1)
    )
    units = tuple((int(group[0]), int(group[-1]) + 1) for group in tokens)
    hashes = tuple(inputs_hash(unit, salt) for unit in inputs)
    return Processed(replace(layout, units=units, unit_hashes=hashes), inputs)
