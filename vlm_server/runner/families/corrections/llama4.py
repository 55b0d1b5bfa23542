"""Corrections of mlx-vlm's Llama 4: attention in blocks, and the small copy of a cut image.

Most layers attend to the block, of a fixed size, that a token is in. mlx-vlm keeps a block's keys
in a cache that can be neither batched nor stored, and gives all rows of a batch the positions of
the longest. Here these layers have plain caches and a mask.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_vlm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_vlm.models.cache import KVCache
from PIL import Image

from vlm_server.runner.backends.bounded_layer import BoundedLayer, MixedLayer
from vlm_server.runner.families.corrections import Settings, override

_LAYERS_PER_GLOBAL = 4
"""Each fourth layer attends to all tokens, without positions."""


def correct(model: Any, processor: Any, _settings: Settings) -> None:
    """Let layers have caches that append, rows their own positions, and images all their tiles."""
    language_model, image_processor = model.language_model, processor.image_processor
    override(language_model, make_cache=_make_cache)
    override(language_model.model, __call__=_call_layers)
    for layer in language_model.layers[_LAYERS_PER_GLOBAL - 1 :: _LAYERS_PER_GLOBAL]:
        override(layer.self_attn, __call__=_attend_to_all)
    override(model, _prepare_inputs_for_multimodal=_place_features)
    split = image_processor._split_into_tiles

    def split_with_copy(image: Any, ratio: tuple[int, int]) -> list[Any]:
        tiles: list[Any] = split(image, ratio)
        small = image.resize((image_processor.size,) * 2, Image.Resampling.BICUBIC)
        return [*tiles, small] if len(tiles) > 1 else tiles

    image_processor._split_into_tiles = split_with_copy


def _place_features(self: Any, features: mx.array, text: mx.array, token_ids: mx.array) -> mx.array:
    """mlx-vlm's reads beyond the end of `features` for an image with more tokens than those."""
    is_image = token_ids == self.config.image_token_index
    num_tokens = int(is_image.sum())
    if num_tokens != len(features):
        raise ValueError(f"an image has {num_tokens} tokens and {len(features)} features")
    places = mx.maximum(mx.cumsum(is_image.astype(mx.int32), axis=1) - 1, 0)
    return mx.where(is_image[..., None], features[places], text)


def _make_cache(self: Any) -> list[KVCache]:
    return [KVCache() for _ in self.layers]


def _call_layers(
    self: Any, input_ids: Any = None, input_embeds: Any = None, mask: Any = None, cache: Any = None
) -> Any:
    h = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
    cache = cache or _make_cache(self)
    if isinstance(cache[0], BoundedLayer | MixedLayer):
        raise NotImplementedError("a compiled step has no masks")
    mask = create_attention_mask(h, cache[0])
    block_mask = _block_mask(mask, cache[0], h.shape[1], self.config.attention_chunk_size)
    for number, (layer, layer_cache) in enumerate(zip(self.layers, cache, strict=True), 1):
        h = layer(h, block_mask if number % _LAYERS_PER_GLOBAL else mask, cache=layer_cache)
    return self.norm(h)


def _block_mask(mask: Any, cache: Any, count: int, size: int) -> Any:
    """(rows, 1, count, columns) bool: those of `mask` in the block of each of `count` new tokens.

    `mask` itself if no row has more tokens than a block.
    """
    paddings = getattr(cache, "left_padding", mx.zeros((1,), dtype=mx.int32))
    num_columns = getattr(cache, "_idx", cache.offset) + count
    if num_columns <= size:
        return mask
    columns = mx.arange(num_columns) - paddings[:, None]
    tokens = (cache.offset + mx.zeros_like(paddings))[:, None] + mx.arange(count)
    columns, tokens = columns[:, None, None, :], tokens[:, None, :, None]
    return (columns // size == tokens // size) & (columns <= tokens)


def _attend_to_all(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
    """Attention without positions, to which queries are scaled by their own."""
    rows, count, _ = x.shape

    def heads(array: mx.array, num_heads: int) -> mx.array:
        return array.reshape(rows, count, num_heads, -1).transpose(0, 2, 1, 3)

    queries = heads(self.q_proj(x), self.n_heads)
    keys = heads(self.k_proj(x), self.n_kv_heads)
    values = heads(self.v_proj(x), self.n_kv_heads)
    if self.attn_temperature_tuning:
        before = mx.zeros((1, 1), dtype=mx.int32) + mx.array(cache.offset).reshape(-1, 1)
        blocks = mx.floor((before + mx.arange(1, count + 1)) / self.floor_scale)
        scales = mx.log(blocks + 1.0) * self.attn_scale + 1.0
        queries = (queries * scales[:, None, :, None]).astype(queries.dtype)
    keys, values = cache.update_and_fetch(keys, values)
    output = scaled_dot_product_attention(queries, keys, values, cache, scale=self.scale, mask=mask)
    return self.o_proj(output.transpose(0, 2, 1, 3).reshape(rows, count, -1))
