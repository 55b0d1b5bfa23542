"""GLM-4.1V: rows of patches with a grid per image; M-RoPE over half of each head."""

from __future__ import annotations

from dataclasses import replace

from tests.tiny_models.checkpoint import Checkpoint
from tests.tiny_models.llama import llama
from tests.tiny_models.text_parts import ROUTED
from tests.tiny_models.vision_language import images, vision_family, words
from tests.tiny_models.vocabulary import Vocabulary

PATCH = 14
MERGE = 2
BLOCK_PIXELS = (PATCH * MERGE) ** 2

TEMPLATE = """\
{%- macro render(content) -%}
{%- if content is string %}{{- content }}
{%- else %}
{%- for part in content %}
{%- if part.type == 'video' or 'video' in part %}
{{- '<|begin_of_video|><|video|><|end_of_video|>' }}
{%- elif part.type == 'image' or 'image' in part %}
{{- '<|begin_of_image|><|image|><|end_of_image|>' }}
{%- elif part.type == 'text' %}{{- part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{%- endmacro -%}
{{- '[gMASK]<sop>' }}
{%- for message in messages %}
{{- '<|' + message.role + '|>\\n' + render(message.content) }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>\\n' }}
{%- endif %}
"""


GLM4V = vision_family(
    words(
        "<|endoftext|> [MASK] [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> "
        "<|begin_of_image|> <|image|> <|end_of_image|> <|begin_of_video|> <|video|> "
        "<|end_of_video|> <|begin_of_box|> <|end_of_box|> <think> </think>"
    ),
    "Glm4vForConditionalGeneration",
    "glm4v",
    llama(
        "glm4v_text",
        attention_bias=True,
        partial_rotary_factor=0.5,
        rope_scaling={"rope_type": "default", "mrope_section": [2, 1, 1]},
    ),
    images(
        "Glm4v",
        patch_size=PATCH,
        temporal_patch_size=2,
        merge_size=MERGE,
        size={"shortest_edge": 8 * BLOCK_PIXELS, "longest_edge": 2560 * BLOCK_PIXELS},
    ),
    template=TEMPLATE,
    ids={
        "image_token_id": "<|image|>",
        "image_token_index": "<|image|>",
        "video_token_id": "<|video|>",
        "video_token_index": "<|video|>",
        "image_start_token_id": "<|begin_of_image|>",
        "image_end_token_id": "<|end_of_image|>",
        "video_start_token_id": "<|begin_of_video|>",
        "video_end_token_id": "<|end_of_video|>",
        "vision_start_token_id": "<|begin_of_image|>",
        "vision_end_token_id": "<|end_of_image|>",
    },
    tokens={"image_token": "<|image|>", "video_token": "<|video|>"},
    eos=("<|endoftext|>", "<|user|>", "<|observation|>"),
    hidden_size=64,
    vision_config={
        "model_type": "glm4v",
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "num_heads": 2,
        "in_channels": 3,
        "image_size": 8 * PATCH,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
    },
)


def _moe(vocabulary: Vocabulary) -> Checkpoint:
    """GLM-4.5V: a dense layer, then layers with experts, and norms on queries and keys."""
    made = GLM4V.describe(vocabulary)
    text = made.config["text_config"] | ROUTED | {"model_type": "glm4v_moe_text"}
    config = made.config | {
        "architectures": ["Glm4vMoeForConditionalGeneration"],
        "model_type": "glm4v_moe",
        "text_config": text | {"use_qk_norm": True},
        "vision_config": made.config["vision_config"] | {"model_type": "glm4v_moe"},
    }
    return replace(made, config=config)


def _ocr(vocabulary: Vocabulary) -> Checkpoint:
    """GLM-OCR: norms on the vision tower's queries and keys, M-RoPE over each whole head."""
    made = GLM4V.describe(vocabulary)
    text = made.config["text_config"] | {
        "model_type": "glm_ocr_text",
        "attention_bias": False,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [2, 3, 3],
            "partial_rotary_factor": 1.0,
            "rope_theta": 10000.0,
        },
    }
    for name in ("partial_rotary_factor", "rope_scaling", "rope_theta"):
        del text[name]
    config = made.config | {
        "architectures": ["GlmOcrForConditionalGeneration"],
        "model_type": "glm_ocr",
        "text_config": text,
        "vision_config": made.config["vision_config"] | {"model_type": "glm_ocr_vision"},
    }
    settings = made.files["preprocessor_config.json"] | {
        "image_processor_type": "Glm46VImageProcessor",
        "processor_class": "GlmOcrProcessor",
    }
    return replace(made, config=config, files={"preprocessor_config.json": settings})


GLM4V_MOE = replace(GLM4V, describe=_moe)
GLM_OCR = replace(GLM4V, describe=_ocr)
