"""One picture to the rows that stand for it in a prompt. Knows the vision tower's door."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from vlm_server.errors import InternalError, OutOfMemory
from vlm_server.ports import EncodeWork, MediaInputs
from vlm_server.runner.device.memory import NO_MEMORY, is_out_of_memory
from vlm_server.runner.vision.patches import PIXEL_BYTES
from vlm_server.runner.vision.towers import FrameTower


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """What the model makes of one picture; it depends on that picture alone.

    rows: (span tokens, hidden), the picture's rows of `inputs_embeds`.
    visual_mask: (span tokens,) bool, which of them deepstack adds to; None without deepstack.
    deepstack: (layers, visual tokens, hidden); None without deepstack.
    """

    rows: mx.array
    visual_mask: mx.array | None
    deepstack: mx.array | None

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    @property
    def arrays(self) -> list[mx.array]:
        made = (self.rows, self.visual_mask, self.deepstack)
        return [array for array in made if array is not None]


class ImageEncoder:
    """The `Encoder` of one model. Works on a thread and a stream of its own."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def encode(self, work: EncodeWork) -> ImageFeatures:
        """The features of a span's media; the arrays are evaluated.

        Raises OutOfMemory if there is none for it, and what `encode_image` does.
        """
        try:
            return encode_image(self._model, work)
        except Exception as error:
            if is_out_of_memory(error):
                raise OutOfMemory(NO_MEMORY) from error
            raise


def encode_image(model: Any, work: EncodeWork) -> ImageFeatures:
    """Run the vision tower on the media of one span; the arrays are evaluated.

    Raises InternalError if there are not as many rows as tokens, or rows that are not finite: such
    features would be stored for everybody who shows this picture.
    """
    if PIXEL_BYTES in work.inputs:
        features = _from_tower(model.vision_tower, work.inputs)
    else:
        features = _from_family(model, work)
    num_rows = features.rows.shape[0]
    if num_rows != work.num_tokens:
        raise InternalError(
            f"A picture's {work.num_tokens} tokens got {num_rows} rows of features."
        )
    are_finite = mx.all(mx.isfinite(features.rows))
    mx.eval(are_finite, features.arrays)
    if not are_finite.item():
        raise InternalError("The features of a picture are not finite.")
    return features


def _from_tower(tower: FrameTower, inputs: MediaInputs) -> ImageFeatures:
    """A picture whose tokens are its rows alone: no text to put them into, nothing to wait for."""
    made = tower.encode_bytes(inputs[PIXEL_BYTES], inputs["image_grid_thw"])
    if not made.deepstack:
        return ImageFeatures(made.rows, None, None)
    everywhere = mx.ones(made.rows.shape[:1], dtype=mx.bool_)
    return ImageFeatures(made.rows, everywhere, mx.stack(made.deepstack))


def _from_family(model: Any, work: EncodeWork) -> ImageFeatures:
    """By `get_input_embeddings` on the picture's own tokens.

    The one call that every family of mlx-vlm has, whatever it does to a picture's features
    before they enter the text.
    """
    ids = mx.array(work.prompt.token_ids[work.span.start : work.span.end])[None]
    inputs = {key: mx.array(value) for key, value in work.inputs.items()}
    pixel_values = inputs.pop("pixel_values", None)  # a video's have another name
    made = model.get_input_embeddings(ids, pixel_values, mask=mx.ones_like(ids), **inputs)
    deepstack = made.deepstack_visual_embeds
    return ImageFeatures(
        rows=made.inputs_embeds[0],
        visual_mask=None if deepstack is None else made.visual_pos_masks[0],
        deepstack=None if deepstack is None else mx.stack(list(deepstack)),
    )
