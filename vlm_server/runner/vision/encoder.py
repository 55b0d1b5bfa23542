"""One picture to the rows that stand for it in a prompt. Knows the vision tower's door."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from vlm_server.errors import InternalError, OutOfMemory
from vlm_server.ports import ImageSpan, PreparedPrompt
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

    def encode(self, prompt: PreparedPrompt, image_index: int) -> ImageFeatures:
        """The features of picture `image_index`; the arrays are evaluated.

        Raises OutOfMemory if there is none for it, and what `encode_image` does.
        """
        try:
            return encode_image(self._model, prompt, prompt.images[image_index])
        except Exception as error:
            if is_out_of_memory(error):
                raise OutOfMemory(NO_MEMORY) from error
            raise


def encode_image(model: Any, prompt: PreparedPrompt, span: ImageSpan) -> ImageFeatures:
    """Run the vision tower on one picture of `prompt`; the arrays are evaluated.

    Raises InternalError if the rows that it makes are not as many as the tokens, or no numbers:
    such features would be kept for everybody who shows this picture.
    """
    if PIXEL_BYTES in span.inputs:
        features = _from_tower(model.vision_tower, span)
    else:
        features = _from_family(model, prompt, span)
    num_rows, num_tokens = features.rows.shape[0], span.end - span.start
    if num_rows != num_tokens:
        raise InternalError(f"a picture's {num_tokens} tokens got {num_rows} rows of features")
    are_numbers = mx.all(mx.isfinite(features.rows))
    mx.eval(are_numbers, features.arrays)
    if not are_numbers.item():
        raise InternalError("the features of a picture are not finite")
    return features


def _from_tower(tower: FrameTower, span: ImageSpan) -> ImageFeatures:
    """A picture whose tokens are its rows alone: no text to put them into, nothing to wait for."""
    made = tower.encode_bytes(span.inputs[PIXEL_BYTES], span.inputs["image_grid_thw"])
    if not made.deepstack:
        return ImageFeatures(made.rows, None, None)
    everywhere = mx.ones(made.rows.shape[:1], dtype=mx.bool_)
    return ImageFeatures(made.rows, everywhere, mx.stack(made.deepstack))


def _from_family(model: Any, prompt: PreparedPrompt, span: ImageSpan) -> ImageFeatures:
    """By `get_input_embeddings` on the picture's own tokens.

    The one call that every family of mlx-vlm has, whatever it does to a picture's features
    before they enter the text.
    """
    ids = mx.array(prompt.token_ids[span.start : span.end])[None]
    inputs = {key: mx.array(value) for key, value in span.inputs.items()}
    pixel_values = inputs.pop("pixel_values", None)  # a video's have another name
    made = model.get_input_embeddings(ids, pixel_values, mask=mx.ones_like(ids), **inputs)
    deepstack = made.deepstack_visual_embeds
    return ImageFeatures(
        rows=made.inputs_embeds[0],
        visual_mask=None if deepstack is None else made.visual_pos_masks[0],
        deepstack=None if deepstack is None else mx.stack(list(deepstack)),
    )
