"""GLM-4.1V: rows of patches with a grid per image; M-RoPE over half of each head."""

from __future__ import annotations

from dataclasses import replace

from tests.tiny_models.checkpoint import Checkpoint, Family, Json
from tests.tiny_models.llama import llama
from tests.tiny_models.vocabulary import Vocabulary

SPECIALS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|video|>",
    "<|end_of_video|>",
    "<|begin_of_box|>",
    "<|end_of_box|>",
    "<think>",
    "</think>",
)
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


def _config(vocabulary: Vocabulary) -> Json:
    return {
        "architectures": ["Glm4vForConditionalGeneration"],
        "model_type": "glm4v",
        "vocab_size": len(vocabulary),
        "hidden_size": 64,
        "image_token_id": vocabulary.id("<|image|>"),
        "image_token_index": vocabulary.id("<|image|>"),
        "video_token_id": vocabulary.id("<|video|>"),
        "video_token_index": vocabulary.id("<|video|>"),
        "image_start_token_id": vocabulary.id("<|begin_of_image|>"),
        "image_end_token_id": vocabulary.id("<|end_of_image|>"),
        "video_start_token_id": vocabulary.id("<|begin_of_video|>"),
        "video_end_token_id": vocabulary.id("<|end_of_video|>"),
        "vision_start_token_id": vocabulary.id("<|begin_of_image|>"),
        "vision_end_token_id": vocabulary.id("<|end_of_image|>"),
        "text_config": llama(
            len(vocabulary),
            model_type="glm4v_text",
            attention_bias=True,
            partial_rotary_factor=0.5,
            rope_scaling={"rope_type": "default", "mrope_section": [2, 1, 1]},
        ),
        "vision_config": {
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
    }


def _describe(vocabulary: Vocabulary) -> Checkpoint:
    return Checkpoint(
        config=_config(vocabulary),
        template=TEMPLATE,
        eos=("<|endoftext|>", "<|user|>", "<|observation|>"),
        pad="<|endoftext|>",
        tokens={"image_token": "<|image|>", "video_token": "<|video|>"},
        files={
            "preprocessor_config.json": {
                "image_processor_type": "Glm4vImageProcessor",
                "processor_class": "Glm4vProcessor",
                "patch_size": PATCH,
                "temporal_patch_size": 2,
                "merge_size": MERGE,
                "size": {"shortest_edge": 8 * BLOCK_PIXELS, "longest_edge": 2560 * BLOCK_PIXELS},
            }
        },
    )


GLM4V = Family(SPECIALS, _describe)


def _config_moe(vocabulary: Vocabulary) -> Json:
    """GLM-4.5V: a dense layer, then layers with experts, and norms on queries and keys."""
    config = _config(vocabulary)
    experts = {
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "routed_scaling_factor": 1.0,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
    }
    text = config["text_config"] | experts | {"model_type": "glm4v_moe_text"}
    vision = config["vision_config"] | {"model_type": "glm4v_moe"}
    return config | {
        "architectures": ["Glm4vMoeForConditionalGeneration"],
        "model_type": "glm4v_moe",
        "text_config": text,
        "vision_config": vision,
    }


def _describe_moe(vocabulary: Vocabulary) -> Checkpoint:
    return replace(_describe(vocabulary), config=_config_moe(vocabulary))


GLM4V_MOE = Family(SPECIALS, _describe_moe)


def _config_ocr(vocabulary: Vocabulary) -> Json:
    """GLM-OCR: norms on the vision tower's queries and keys, M-RoPE over each whole head."""
    config = _config(vocabulary)
    text = config["text_config"] | {
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
    vision = config["vision_config"] | {"model_type": "glm_ocr_vision"}
    return config | {
        "architectures": ["GlmOcrForConditionalGeneration"],
        "model_type": "glm_ocr",
        "text_config": text,
        "vision_config": vision,
    }


def _describe_ocr(vocabulary: Vocabulary) -> Checkpoint:
    made = _describe(vocabulary)
    settings = made.files["preprocessor_config.json"]
    settings |= {
        "image_processor_type": "Glm46VImageProcessor",
        "processor_class": "GlmOcrProcessor",
    }
    return replace(
        made,
        config=_config_ocr(vocabulary),
        files={"preprocessor_config.json": settings},
    )


GLM_OCR = Family(SPECIALS, _describe_ocr)
