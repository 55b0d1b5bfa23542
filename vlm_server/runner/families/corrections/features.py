"""Corrections of models that read images: their features, and the embeddings of a prompt."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.base import InputEmbeddingsFeatures
from mlx_vlm.models.llava_onevision.llava_onevision import Model as LlavaOnevision

from vlm_server.runner.families.corrections import Settings, override


def pack_tiles(model: Any, processor: Any, _settings: Settings) -> None:
    """LLaVA-NeXT: encode images as LLaVA-OneVision does, without the limit on their size: tiles
    become one image, without padding, whose rows end with a newline. mlx-vlm puts each tile in the
    place of one of the tokens that its processor counts so, and as many newlines after them."""
    model.config.image_grid_pinpoints = processor.image_processor.image_grid_pinpoints
    packing: dict[str, Any] = {name: vars(LlavaOnevision)[name] for name in _PACKING}
    override(model, max_num_patches=_NO_LIMIT, **packing)


_PACKING = (
    "patches_per_side",
    "_select_features",
    "pack_image_features",
    "get_image_features",
    "_scatter_features",
    "get_input_embeddings",
)
_NO_LIMIT = 1 << 20


def look_up_both(table: Any) -> None:
    """Look up a token in the one of a table's two parts that has it: mlx-vlm joins both, by a copy,
    each time."""

    def call(self: Any, token_ids: mx.array) -> mx.array:
        count = len(self.embedding)
        in_text = self.embedding[mx.minimum(token_ids, count - 1)]
        further = self.new_embedding[mx.maximum(token_ids, count) - count]
        return mx.where((token_ids < count)[..., None], in_text, further)

    override(table, __call__=call)


def embed_apart(model: Any, processor: Any, _settings: Settings) -> None:
    """EmbeddingGemma 2: let the embeddings of a prompt be computed apart from its vectors, with
    those of images in their places, as mlx-vlm's other models do; and let its processor be called
    as this version of transformers does."""
    override(model, get_input_embeddings=_embed_apart)
    merge = type(processor)._merge_kwargs

    def merge_kwargs(self: Any, own: Any = None, initial: Any = None, **kwargs: Any) -> Any:
        initial = kwargs.pop("tokenizer_init_kwargs", initial)
        return merge(self, own, initial, **kwargs)

    override(processor, _merge_kwargs=merge_kwargs)


def _embed_apart(
    model: Any,
    input_ids: mx.array,
    pixel_values: mx.array | None = None,
    image_position_ids: mx.array | None = None,
    **_: Any,
) -> InputEmbeddingsFeatures:
    config = model.config
    is_image = input_ids == config.image_token_id
    text = config.text_config
    text_ids = mx.where(is_image, text.pad_token_id, input_ids)
    embeddings = model.language_model.embed_tokens(text_ids)
    embeddings = embeddings * mx.array(text.hidden_size**0.5, dtype=embeddings.dtype)
    if pixel_values is not None:
        features = model.get_image_features(pixel_values, image_position_ids)
        embeddings = model._scatter(embeddings, input_ids, config.image_token_id, features)
    return InputEmbeddingsFeatures(inputs_embeds=embeddings)


def name_deepstack_layers(model: Any, _processor: Any, _settings: Settings) -> None:
    """Granite 4 Vision: set the decoder's layers at which features enter. mlx-vlm does so when it
    encodes an image, but features may come from a cache."""
    config = model.config
    layers = [layer for _, layer in config.deepstack_layer_map or []]
    if config.use_spatial_sampling:
        layers += config.spatial_target_layers or []
    model.language_model.model._deepstack_target_layers = layers or None


def embed_as_trained(model: Any, _processor: Any, _settings: Settings) -> None:
    """Gemma 3n: scale the embeddings of prompts too, not just those of the answer's tokens, give
    tokens beyond the text's vocabulary embeddings of their own, and rotate queries of layers that
    share keys by their own positions, not by those after them.

    As transformers does; without this, answers change with the size of the prefill chunks.
    """
    original, text, vision = (
        model.get_input_embeddings,
        model.language_model.model,
        model.embed_vision,
    )
    scale = text.hidden_size**0.5

    def get_input_embeddings(input_ids: Any, pixel_values: Any = None, **further: Any) -> Any:
        embeddings = original(input_ids, pixel_values, **further)
        rest = embeddings.inputs_embeds
        if pixel_values is None:
            rest = vision(input_ids=mx.maximum(input_ids, vision.vocab_offset))
        is_text = (input_ids < vision.vocab_offset)[..., None]
        embeddings.inputs_embeds = mx.where(is_text, embeddings.inputs_embeds * scale, rest)
        return embeddings

    model.get_input_embeddings = get_input_embeddings
    for layer in text.layers:
        if layer.self_attn.is_kv_shared_layer:
            layer.self_attn.rope = _RopeBefore(layer.self_attn.rope)


class _RopeBefore(nn.Module):  # type: ignore[misc,name-defined]  # mlx.nn is not typed
    """RoPE that is called with the position after its input instead of its first position."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self._inner = inner

    def __call__(self, x: mx.array, offset: Any) -> Any:
        return self._inner(x, offset=offset - x.shape[2])
