"""Corrections of mlx-vlm's processors and models of some families.

Each function changes a loaded model, its processor, or both; `settings` is the checkpoint's
preprocessor_config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.base import InputEmbeddingsFeatures, LanguageModelOutput
from mlx_vlm.models.gpt2.language import GPT2Model
from mlx_vlm.models.llava_onevision.llava_onevision import Model as LlavaOnevision

from vlm_server.runner.model import idefics2, llama4, molmo, paligemma

Settings = Mapping[str, Any]
Fix = Callable[[Any, Any, Settings], None]
"""(model, processor, settings)."""


def drop_tokenizer_options(_model: Any, processor: Any, _settings: Settings) -> None:
    """Let LLaVA's processor accept images: this version of transformers rejects all."""
    processor.image_processor = _ImagesOnly(processor.image_processor)


def read_settings(_model: Any, processor: Any, settings: Settings) -> None:
    """Let an image processor have the checkpoint's mean, padding and limits: mlx-vlm makes one with
    defaults where a family's package has an `ImageProcessor`."""
    image_processor = processor.image_processor
    for key, value in settings.get("media_proc_cfg", settings).items():
        name = _OTHER_NAMES.get(key, key)
        if name in vars(image_processor) and not name.startswith("_"):
            is_square = isinstance(value, int) and isinstance(vars(image_processor)[name], list)
            setattr(image_processor, name, [value, value] if is_square else value)


_OTHER_NAMES = {"in_patch_limit": "in_token_limit"}
"""Names of settings in Kimi K2.5's checkpoints, with those of mlx-vlm."""


def pack_tiles(model: Any, processor: Any, _settings: Settings) -> None:
    """LLaVA-NeXT: encode images as LLaVA-OneVision does, without the limit on their size: tiles
    become one image, without padding, whose rows end with a newline. mlx-vlm puts each tile in the
    place of one of the tokens that its processor counts so, and as many newlines after them."""
    model.config.image_grid_pinpoints = processor.image_processor.image_grid_pinpoints
    packing: dict[str, Any] = {name: vars(LlavaOnevision)[name] for name in _PACKING}
    packing |= {"max_num_patches": _NO_LIMIT, "__module__": type(model).__module__}
    model.__class__ = type("PackedLlavaNext", (type(model),), packing)


_PACKING = (
    "patches_per_side",
    "_select_features",
    "pack_image_features",
    "get_image_features",
    "_scatter_features",
    "get_input_embeddings",
)
_NO_LIMIT = 1 << 20


def look_up_both_tables(model: Any, processor: Any, settings: Settings) -> None:
    """Molmo 2: look up a token in the table that has it: mlx-vlm joins both, by a copy, each time.
    Also `read_settings`."""
    read_settings(model, processor, settings)
    table = model.language_model.model.wte

    def call(self: Any, token_ids: mx.array) -> mx.array:
        count = len(self.embedding)
        in_text = self.embedding[mx.minimum(token_ids, count - 1)]
        further = self.new_embedding[mx.maximum(token_ids, count) - count]
        return mx.where((token_ids < count)[..., None], in_text, further)

    table.__class__ = type("BothTables", (type(table),), {"__call__": call})


def look_up_image_token(_model: Any, processor: Any, _settings: Settings) -> None:
    """Let a processor count image tokens by its tokenizer's id, not by one in its code."""
    processor.image_token_id = processor.tokenizer.convert_tokens_to_ids(processor.image_token)


def name_image_context(model: Any, processor: Any, _settings: Settings) -> None:
    """InternVL: set the tokenizer's image token, which differs between versions, on the model, and
    the prompts' text of an image on the processor; use the checkpoint's template rather than
    mlx-vlm's, which has no marks of turns."""
    model.config.image_token_index = processor.img_context_token_id
    processor.image_token = "<image>"  # noqa: S105 - the text of an image in prompts
    processor.chat_template = processor.tokenizer.chat_template


class _ImagesOnly:
    """Calls an image processor without the tokenizer's options, which it would reject."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.model_input_names = inner.model_input_names

    def __call__(self, images: Any, **_: Any) -> Any:
        return self._inner(images)


def embed_apart(model: Any, processor: Any, _settings: Settings) -> None:
    """EmbeddingGemma 2: let the embeddings of a prompt be computed apart from its vectors, with
    those of images in their places, as mlx-vlm's other models do; and let its processor be called
    as this version of transformers does."""
    kind = type(model)
    model.__class__ = type(kind.__name__, (kind,), {"get_input_embeddings": _embed_apart})
    kind = type(processor)
    merge = kind._merge_kwargs

    def merge_kwargs(self: Any, own: Any = None, initial: Any = None, **kwargs: Any) -> Any:
        initial = kwargs.pop("tokenizer_init_kwargs", initial)
        return merge(self, own, initial, **kwargs)

    processor.__class__ = type(kind.__name__, (kind,), {"_merge_kwargs": merge_kwargs})


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


def group_masks(model: Any, _processor: Any, _settings: Settings) -> None:
    """Gemma 2: give masks of several rows the axis of the groups of heads, which its own attention
    lacks: it can't compute a batch."""
    for layer in model.language_model.layers:
        if layer.self_attn.repeats > 1:
            layer.self_attn = _GroupedMask(layer.self_attn)


class _GroupedMask(nn.Module):  # type: ignore[misc,name-defined]  # mlx.nn is not typed
    """Attention by groups of heads, called with a mask, (rows, 1, queries, keys)."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> Any:
        if mask is not None and mask.ndim == _ROWS_DIMENSIONS:
            mask = mx.expand_dims(mask, 1)
        return self.inner(x, mask, cache)


_ROWS_DIMENSIONS = 4


def scale_all_embeddings(model: Any, _processor: Any, _settings: Settings) -> None:
    """Granite, MiniCPM: scale the embeddings of an answer's tokens too, not just those of the
    prompt."""
    text = model.language_model.model
    kind = type(text)

    def call(self: Any, inputs: Any, *further: Any, inputs_embeds: Any = None) -> Any:
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(inputs)
        return kind.__call__(self, inputs, *further, inputs_embeds=inputs_embeds)

    _override_call(text, call)


def _override_call(module: Any, call: Callable[..., Any]) -> None:
    kind = type(module)
    module.__class__ = type(f"Fixed{kind.__name__}", (kind,), {"__call__": call})


def count_positions_of_rows(model: Any, _processor: Any, _settings: Settings) -> None:
    """GPT-BigCode: positions of each row, as GPT-2 counts them; mlx-vlm counts those of one row."""
    _override_call(model.language_model.transformer, GPT2Model.__call__)


def head_of_embeddings(model: Any, _processor: Any, _settings: Settings) -> None:
    """Llama 4's text model: logits by its embeddings, if they are its head; mlx-vlm's have no name,
    and no quantized embeddings."""
    if not model.language_model.tie_word_embeddings:
        return

    def call(self: Any, inputs: Any, cache: Any = None, inputs_embeds: Any = None, **_: Any) -> Any:
        hidden = self.model(inputs, cache, inputs_embeds=inputs_embeds)
        return LanguageModelOutput(logits=self.model.embed_tokens.as_linear(hidden))

    _override_call(model.language_model, call)


def use_images_alone(model: Any, processor: Any, _settings: Settings) -> None:
    """MiniCPM-o: leave out what its processor says of audio and of the images' former sizes, and
    keep the images' tokens, which it drops where there is no token for listening. Its language
    model, which is Qwen3-VL's, asks for numbers that its configuration lacks, for media alone."""
    kind = type(processor)
    model.config.vision_config.spatial_merge_size = 1
    for name in ("image_token_id", "video_token_id", "vision_start_token_id"):
        setattr(model.config, name, -1)
    if processor.listen_token_id == processor.tokenizer.unk_token_id:
        processor.listen_token_id = None

    def call(self: Any, *args: Any, **arguments: Any) -> Any:
        inputs = kind.__call__(self, *args, **arguments)
        names = ("input_ids", "attention_mask", "pixel_values", "tgt_sizes", "image_bound")
        return {name: inputs[name] for name in names}

    processor.__class__ = type(kind.__name__, (kind,), {"__call__": call})


def use_static_rope(model: Any, _processor: Any, _settings: Settings) -> None:
    """InternLM 2 and 3: RoPE with the base of prompts within the context, which is all that is
    served. mlx-vlm's compares one position with the context's length, and fails for several
    rows."""
    for module in model.language_model.modules():
        rope = module.get("rope")
        if type(rope).__name__ == "DynamicNTKScalingRoPE":
            module.rope = nn.RoPE(  # type: ignore[attr-defined]
                rope.dims, rope.traditional, rope.original_base, rope.scale
            )


def correct_llama4(model: Any, processor: Any, _settings: Settings) -> None:
    """See `llama4`."""
    llama4.correct(model, processor)


def correct_idefics2(model: Any, processor: Any, _settings: Settings) -> None:
    """See `idefics2`."""
    idefics2.correct(model, processor)


def correct_molmo(model: Any, processor: Any, settings: Settings) -> None:
    """See `molmo`, and `look_up_both_tables`."""
    look_up_both_tables(model, processor, settings)
    molmo.expand_in_place(processor)


def correct_paligemma(model: Any, processor: Any, _settings: Settings) -> None:
    """See `paligemma`."""
    paligemma.correct(model, processor)


class _RopeBefore(nn.Module):  # type: ignore[misc,name-defined]  # mlx.nn is not typed
    """RoPE that is called with the position after its input instead of its first position."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self._inner = inner

    def __call__(self, x: mx.array, offset: Any) -> Any:
        return self._inner(x, offset=offset - x.shape[2])
