"""LLaVA 1.5 and 1.6: square images of one size through CLIP, before a message's text or within it;
in LLaVA 1.6 (LLaVA-NeXT), followed by tiles, each row of which ends with a newline."""

from __future__ import annotations

from dataclasses import replace

from tests.tiny_models import chatml
from tests.tiny_models.checkpoint import Checkpoint, Family, Json
from tests.tiny_models.llama import llama, vit
from tests.tiny_models.vocabulary import Vocabulary

SPECIALS = ("<unk>", "<s>", "</s>", "<pad>", "<image>")
IMAGE_SIDE_PIXELS = 56
PATCH = 14

TEMPLATE = """\
{%- for message in messages %}
{%- set parts = [{'type': 'text', 'text': message.content}] if message.content is string
   else message.content %}
{%- if message.role != 'system' %}{{- message.role | upper + ': ' }}{% endif %}
{%- for part in parts if part.type == 'image' %}{{- '<image>\\n' }}{% endfor %}
{%- for part in parts if part.type == 'text' %}{{- part.text + ' ' }}{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'ASSISTANT:' }}{% endif %}
"""


def _config(vocabulary: Vocabulary) -> Json:
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "vocab_size": len(vocabulary),
        "image_token_index": vocabulary.id("<image>"),
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "text_config": llama(len(vocabulary)),
        "vision_config": vit(
            "clip_vision_model",
            PATCH,
            num_hidden_layers=3,
            image_size=IMAGE_SIDE_PIXELS,
            projection_dim=32,
        ),
    }


def _describe(vocabulary: Vocabulary) -> Checkpoint:
    return Checkpoint(
        config=_config(vocabulary),
        template=TEMPLATE,
        eos=("</s>",),
        pad="<pad>",
        tokens={"image_token": "<image>"},
        files={
            "preprocessor_config.json": {
                "image_processor_type": "CLIPImageProcessor",
                "processor_class": "LlavaProcessor",
                "size": {"shortest_edge": IMAGE_SIDE_PIXELS},
                "crop_size": {"height": IMAGE_SIDE_PIXELS, "width": IMAGE_SIDE_PIXELS},
            },
            "processor_config.json": {
                "processor_class": "LlavaProcessor",
                "image_token": "<image>",
                "num_additional_image_tokens": 1,
                "patch_size": PATCH,
                "vision_feature_select_strategy": "default",
            },
        },
    )


LLAVA = Family(SPECIALS, _describe, bos="<s>")


def _describe_next(vocabulary: Vocabulary) -> Checkpoint:
    llava = _describe(vocabulary)
    side = IMAGE_SIDE_PIXELS
    pinpoints = [[side, 2 * side], [2 * side, side], [2 * side, 2 * side]]
    config = llava.config | {
        "architectures": ["LlavaNextForConditionalGeneration"],
        "model_type": "llava_next",
        "image_grid_pinpoints": pinpoints,
        "vision_config": llava.config["vision_config"] | {"patch_size": 2 * PATCH},
    }
    images, processors = llava.files.values()
    images = images | {
        "image_processor_type": "LlavaNextImageProcessor",
        "processor_class": "LlavaNextProcessor",
        "image_grid_pinpoints": pinpoints,
    }
    processors = processors | {"processor_class": "LlavaNextProcessor", "patch_size": 2 * PATCH}
    return replace(
        llava,
        config=config,
        template=chatml.chatml("<image>\n"),
        eos=chatml.EOS,
        pad=chatml.PAD,
        files={"preprocessor_config.json": images, "processor_config.json": processors},
    )


LLAVA_NEXT = Family((*chatml.SPECIALS, "<image>"), _describe_next)
