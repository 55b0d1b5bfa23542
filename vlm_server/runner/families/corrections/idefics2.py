"""Corrections of mlx-vlm's Idefics 2: each tile of an image is encoded alone, without padding.

mlx-vlm pads tiles to the size of the largest image of a prompt, lets patches attend to padding,
gives them the positions of their neighbours, and has another activation; its processor writes a
space after an image.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models.base import InputEmbeddingsFeatures, to_mlx
from numpy.typing import NDArray

from vlm_server.runner.families.corrections import Settings, override

MARK = "<fake_token_around_image>"
"""Around an image; one stands between two images."""
_BELOW_ONE = np.float32(1.0 - 1e-6)
_SPLIT_TILES = 5


def correct(model: Any, processor: Any, _settings: Settings) -> None:
    """Encode images, and expand them in prompts, as transformers does."""
    for layer in model.vision_model.encoder.layers:
        layer.mlp.activation_fn = nn.GELU(approx="precise")  # type: ignore[attr-defined]
    override(model, get_input_embeddings=_embed_prompt)
    override(model.vision_model.embeddings, __call__=_embed_patches)
    override(processor, __call__=_expand)


def _embed_prompt(
    self: Any,
    input_ids: Any = None,
    pixel_values: Any = None,
    pixel_attention_mask: Any = None,
    **_: Any,
) -> Any:
    embeddings = self.language_model.embed_tokens(input_ids)
    if pixel_values is None:
        return InputEmbeddingsFeatures(inputs_embeds=embeddings)
    size, rows = self.config.vision_config.patch_size, []
    tiles = pixel_values.reshape(-1, *pixel_values.shape[-3:])
    masks = pixel_attention_mask.reshape(-1, *pixel_attention_mask.shape[-2:]).astype(mx.int32)
    for tile, mask in zip(tiles, masks, strict=True):
        height, width = (int(mask.max(axis=axis).sum()) // size for axis in (1, 0))
        if height and width:
            pixels = tile[:, : height * size, : width * size].transpose(1, 2, 0)[None]
            is_patch = mx.ones((1, height, width), dtype=mx.bool_)
            hidden, *_ = self.vision_model(pixels, is_patch, output_hidden_states=True)
            rows.append(self.connector(hidden.reshape(1, -1, hidden.shape[-1]))[0])
    embeddings = self._prepare_inputs_for_multimodal(mx.concatenate(rows), embeddings, input_ids)
    return InputEmbeddingsFeatures(inputs_embeds=embeddings)


def _embed_patches(self: Any, x: mx.array, mask: Any = None) -> mx.array:
    """mask: (1, rows, columns) of patches, all of the image."""
    _, rows, columns = mask.shape
    side = self.num_patches
    places = _buckets(rows, side)[:, None] * side + _buckets(columns, side)
    patches = mx.flatten(self.patch_embedding(x), start_axis=1, end_axis=2)
    embedded: mx.array = patches + self.position_embedding(mx.array(places.reshape(1, -1)))
    return embedded


def _buckets(count: int, side: int) -> NDArray[Any]:
    """The places of `count` patches among `side` of them that a whole tile has."""
    fractions = np.minimum(np.arange(count, dtype=np.float32) * np.float32(1 / count), _BELOW_ONE)
    places: NDArray[Any] = np.digitize(
        fractions, np.arange(1 / side, 1.0, 1 / side, dtype=np.float32)
    )
    return places


def _expand(self: Any, images: Any = None, text: Any = None, **_: Any) -> Mapping[str, Any]:
    """The tokens of texts with one mark around images and between them, and the images' tiles."""
    tile = f"{MARK}{self.image_token * self.image_seq_len}"
    tiles = tile * (_SPLIT_TILES if self.image_processor.do_image_splitting else 1) + MARK
    texts = [text] if isinstance(text, str) else text
    expanded = [each.replace(self.image_token, tiles).replace(MARK * 2, MARK) for each in texts]
    inputs = self.tokenizer(expanded)
    result: Mapping[str, Any] = to_mlx({**inputs, **self.image_processor([images])})
    return result
