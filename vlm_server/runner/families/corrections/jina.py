"""Corrections of mlx-vlm's Jina VLM: positions of rows, the checkpoint's settings, and its tokens.

mlx-vlm gives all rows of a batch the positions of the longest, cuts images by settings in its code,
and adds features to their tokens one by one, by a copy of the prompt each.
"""

from __future__ import annotations

import inspect
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.base import InputEmbeddingsFeatures
from mlx_vlm.models.jina_vlm.image_processor import ImageProcessor

from vlm_server.runner.families.corrections import Settings, override
from vlm_server.runner.families.corrections.features import look_up_both

IMAGE = "<im_patch>"
FRAME = ("<im_start>", "<im_end>")
_TOKENS = {
    "patch_token_id": IMAGE,
    "start_token_id": FRAME[0],
    "end_token_id": FRAME[1],
    "column_token_id": "<im_col>",
}
_SIDES = "base_input_size"


def correct(model: Any, processor: Any, settings: Settings) -> None:
    """Let rows have their own positions, and images the checkpoint's settings and tokens."""
    look_up_both(model.language_model.embedding)
    for layer in model.language_model.layers:
        rope = layer.attn.rope
        layer.attn.rope = nn.RoPE(rope.dims, base=rope.theta)  # type: ignore[attr-defined]
    override(model, get_input_embeddings=_embed_prompt)
    known = inspect.signature(ImageProcessor).parameters.keys() - {"config"}
    options = {name: value for name, value in settings.items() if name in known}
    if isinstance(options.get(_SIDES), int):
        options[_SIDES] = (options[_SIDES],) * 2
    ids = {name: processor.tokenizer.convert_tokens_to_ids(each) for name, each in _TOKENS.items()}
    processor._image_proc = ImageProcessor(**options | ids)


def _embed_prompt(
    self: Any,
    input_ids: Any = None,
    pixel_values: Any = None,
    image_masks: Any = None,
    image_input_idx: Any = None,
    **_: Any,
) -> Any:
    """Embeddings of the tokens of one prompt, to which features are added.

    pixel_values: (1, crops, patches, values), or more of them along the first axis;
    image_input_idx: the places of features in the prompt, negative for those that have none.
    """
    embeddings = self.language_model.embedding(input_ids)
    if pixel_values is None:
        return InputEmbeddingsFeatures(inputs_embeds=embeddings)
    crops = pixel_values.reshape(1, -1, *pixel_values.shape[-2:])
    masks = image_masks.reshape(1, -1, image_masks.shape[-1])
    features = self.get_image_features(crops, masks)
    features = features.reshape(-1, features.shape[-1])
    places = image_input_idx.reshape(-1)
    features = mx.where(places[:, None] >= 0, features, 0).astype(embeddings.dtype)
    embeddings = embeddings.at[0, mx.maximum(places, 0)].add(features)
    return InputEmbeddingsFeatures(inputs_embeds=embeddings)
