"""LLaVA-OneVision: a whole image, then tiles of it, each row of which ends with a newline."""

from __future__ import annotations

from tests.tiny_models.checkpoint import Checkpoint, Family, Json
from tests.tiny_models.llama import llama, vit
from tests.tiny_models.vocabulary import Vocabulary

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")
TILE_PIXELS = 56
PATCH = 28
PINPOINTS = [[rows * TILE_PIXELS, columns * TILE_PIXELS] for rows in (1, 2) for columns in (1, 2)]

TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<image>' }}
{%- elif part.type == 'video' %}{{- '<video>' }}
{%- else %}{{- '\\n' + part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def _config(vocabulary: Vocabulary) -> Json:
    return {
        "architectures": ["LlavaOnevisionForConditionalGeneration"],
        "model_type": "llava_onevision",
        "vocab_size": len(vocabulary),
        "image_token_index": vocabulary.id("<image>"),
        "video_token_index": vocabulary.id("<video>"),
        "image_grid_pinpoints": PINPOINTS,
        "vision_aspect_ratio": "anyres_max_9",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "use_image_newline_parameter": True,
        "text_config": llama(len(vocabulary), model_type="qwen2"),
        "vision_config": vit(
            "siglip_vision_model", PATCH, image_size=TILE_PIXELS, vision_use_head=False
        ),
    }


def _describe(vocabulary: Vocabulary) -> Checkpoint:
    return Checkpoint(
        config=_config(vocabulary),
        template=TEMPLATE,
        eos=("<|im_end|>", "<|endoftext|>"),
        pad="<|endoftext|>",
        tokens={"image_token": "<image>", "video_token": "<video>"},
        files={
            "preprocessor_config.json": {
                "image_processor_type": "LlavaOnevisionImageProcessor",
                "processor_class": "LlavaOnevisionProcessor",
                "image_grid_pinpoints": PINPOINTS,
                "size": {"height": TILE_PIXELS, "width": TILE_PIXELS},
                "image_mean": [0.5] * 3,
                "image_std": [0.5] * 3,
            },
            "processor_config.json": {
                "processor_class": "LlavaOnevisionProcessor",
                "num_image_tokens": (TILE_PIXELS // PATCH) ** 2,
                "vision_aspect_ratio": "anyres_max_9",
                "vision_feature_select_strategy": "full",
            },
        },
    )


LLAVA_ONEVISION = Family(SPECIALS, _describe)
