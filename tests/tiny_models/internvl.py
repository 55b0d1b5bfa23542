"""InternVL: an image is cut into tiles of one size after its shape, then a small copy follows."""

from __future__ import annotations

from dataclasses import replace

from tests.tiny_models.checkpoint import Checkpoint, Family, Json
from tests.tiny_models.llama import llama
from tests.tiny_models.vocabulary import Vocabulary

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<img>",
    "</img>",
    "<IMG_CONTEXT>",
    "<image>",
    "<video>",
)
TILE_PIXELS = 56
PATCH = 14
TOKENS_PER_TILE = (TILE_PIXELS // PATCH // 2) ** 2
MAX_TILES = 4

TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<IMG_CONTEXT>\\n' }}
{%- elif part.type == 'video' %}{{- '<video>\\n' }}
{%- elif part.type == 'text' %}{{- part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def _config(vocabulary: Vocabulary) -> Json:
    return {
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        "image_token_id": vocabulary.id("<IMG_CONTEXT>"),
        "downsample_ratio": 0.5,
        "max_dynamic_patch": MAX_TILES,
        "min_dynamic_patch": 1,
        "use_thumbnail": True,
        "text_config": llama(len(vocabulary), model_type="qwen3"),
        "vision_config": {
            "model_type": "internvl_vision",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_channels": 3,
            "image_size": [TILE_PIXELS, TILE_PIXELS],
            "patch_size": [PATCH, PATCH],
            "layer_scale_init_value": 1.0,
            "norm_type": "layer_norm",
            "attention_bias": True,
            "use_qk_norm": False,
        },
    }


def _describe(vocabulary: Vocabulary) -> Checkpoint:
    return Checkpoint(
        config=_config(vocabulary),
        template=TEMPLATE,
        eos=("<|im_end|>", "<|endoftext|>"),
        pad="<|endoftext|>",
        tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        files={
            "preprocessor_config.json": {
                "image_processor_type": "GotOcr2ImageProcessor",
                "processor_class": "InternVLProcessor",
                "size": {"height": TILE_PIXELS, "width": TILE_PIXELS},
                "min_patches": 1,
                "max_patches": MAX_TILES,
                "crop_to_patches": True,
            },
            "processor_config.json": {
                "processor_class": "InternVLProcessor",
                "image_seq_length": TOKENS_PER_TILE,
            },
        },
    )


INTERNVL = Family(SPECIALS, _describe)


def _describe_qwen2(vocabulary: Vocabulary) -> Checkpoint:
    internvl = _describe(vocabulary)
    text = llama(len(vocabulary), model_type="qwen2")
    return replace(internvl, config=internvl.config | {"text_config": text})


INTERNVL_QWEN2 = Family(SPECIALS, _describe_qwen2)


TEMPLATE_CHAT = TEMPLATE.replace("<IMG_CONTEXT>", "<image>").replace(
    "{{- part.text }}", "{{- part.text or part.content }}"
)
"""As transformers' conversions write it; mlx-vlm's messages have text as `content`."""


def _config_chat(vocabulary: Vocabulary) -> Json:
    """InternVL 3 and 3.5 as OpenGVLab writes them; they name no image token."""
    config = _config(vocabulary)
    vision = config["vision_config"] | {
        "model_type": "intern_vit_6b",
        "image_size": TILE_PIXELS,
        "patch_size": PATCH,
    }
    text = config["text_config"] | {"attention_bias": False}
    del config["image_token_id"], config["text_config"]
    return config | {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "force_image_size": TILE_PIXELS,
        "llm_config": text,
        "text_config": text,
        "vision_config": vision,
    }


def _describe_chat(vocabulary: Vocabulary) -> Checkpoint:
    return Checkpoint(
        config=_config_chat(vocabulary),
        template=TEMPLATE_CHAT,
        eos=("<|im_end|>", "<|endoftext|>"),
        pad="<|endoftext|>",
        files={"preprocessor_config.json": {"crop_size": TILE_PIXELS}},
    )


INTERNVL_CHAT = Family(SPECIALS, _describe_chat)
