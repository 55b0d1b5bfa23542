"""Corrections of mlx-vlm's Molmo and Molmo 2: prompts, and the look-up of tokens.

mlx-vlm's processor puts one image before a text, and repeats the text for each further image. Here
each image's tokens are in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from mlx_vlm.models.base import to_mlx

from vlm_server.runner.families.corrections import Settings, override
from vlm_server.runner.families.corrections.features import look_up_both
from vlm_server.runner.families.corrections.processors import read_settings

IMAGE = "<im_patch>"
TEMPLATE = """\
{%- for message in messages if message.content is not string %}
{%- for part in message.content if part.type == 'image' %}{{- '<im_patch>' }}{% endfor %}
{%- endfor %}
{%- for message in messages %}
{{- message.role | capitalize + ': ' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}
{%- for part in message.content if part.type == 'text' %}{{- part.text }}{% endfor %}
{%- endif %}
{%- if not loop.last %}{{- ' ' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- ' Assistant:' }}{% endif %}
"""
"""Images, then turns."""


def correct(model: Any, processor: Any, settings: Settings) -> None:
    """Let the processor expand images where they are; also `look_up_both_tables`."""
    look_up_both_tables(model, processor, settings)
    override(processor, __call__=_expand)


def look_up_both_tables(model: Any, processor: Any, settings: Settings) -> None:
    """Molmo 2: see `look_up_both`, and `read_settings`."""
    read_settings(model, processor, settings)
    look_up_both(model.language_model.model.wte)


def _expand(self: Any, images: Any = None, text: Any = None, **_: Any) -> Mapping[str, Any]:
    """The tokens of `text`, and the images' crops, with the places of their features."""
    names = (IMAGE, self.image_col_token, self.image_start_token, self.image_end_token)
    ids = self.tokenizer.convert_tokens_to_ids(list(names))
    first, *pieces = (text if isinstance(text, str) else text[0]).split(IMAGE)
    tokens = self.tokenizer.encode(first)
    crops, places, masks = [], [], []
    for image, piece in zip(images, pieces, strict=True):
        pixels = np.asarray(image.convert("RGB")) / np.float32(255)  # noqa: TID251 - Pillow's
        patches, image_tokens, place, mask = self.image_processor.preprocess(pixels, *ids)
        crops.append(patches)
        places.append(np.where(place < 0, place, place + len(tokens)))
        masks.append(mask)
        tokens += [*image_tokens, *self.tokenizer.encode(piece, add_special_tokens=False)]
    result: Mapping[str, Any] = to_mlx(
        {
            "input_ids": np.concatenate([tokens])[None],
            "attention_mask": np.ones((1, len(tokens)), dtype=np.int32),
            "pixel_values": np.concatenate(crops).astype(np.float32),
            "image_input_idx": np.concatenate(places).astype(np.int32),
            "image_masks": np.concatenate(masks).astype(np.float32),
        }
    )
    return result
