"""Corrections of processors of images: their settings, their tokens, their arguments."""

from __future__ import annotations

from typing import Any

from vlm_server.runner.families.corrections import Settings, override


def drop_tokenizer_options(_model: Any, processor: Any, _settings: Settings) -> None:
    """Let LLaVA's processor accept images: this version of transformers rejects all."""
    processor.image_processor = _ImagesOnly(processor.image_processor)


class _ImagesOnly:
    """Calls an image processor without the tokenizer's options, which it would reject."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.model_input_names = inner.model_input_names

    def __call__(self, images: Any, **_: Any) -> Any:
        return self._inner(images)


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

    override(processor, __call__=call)
