"""Aya Vision: tiles of one size; Cohere's layers, three of four with a sliding window."""

from __future__ import annotations

from tests.tiny_models.checkpoint import MAX_POSITIONS, Checkpoint, Family, Json
from tests.tiny_models.llama import vit
from tests.tiny_models.vocabulary import Vocabulary
from tests.tiny_models.weights import Style

SPECIALS = (
    "<PAD>",
    "<BOS_TOKEN>",
    "<|START_OF_TURN_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
    "<|SYSTEM_TOKEN|>",
    "<|START_RESPONSE|>",
    "<|END_RESPONSE|>",
    "<|START_OF_IMG|>",
    "<|END_OF_IMG|>",
    "<|IMG_PATCH|>",
    "<|IMG_LINE_BREAK|>",
    "TILE",
    "TILE_GLOBAL",
)
TILE_PIXELS = 56
PATCH = 14
WINDOW = 48

TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{%- set names = {'user': 'USER', 'assistant': 'CHATBOT', 'system': 'SYSTEM'} %}
{{- '<|START_OF_TURN_TOKEN|><|' + names[message.role] + '_TOKEN|>' }}
{%- if message.role == 'assistant' %}{{- '<|START_RESPONSE|>' }}{% endif %}
{%- if message.content is string %}{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<image>' }}
{%- elif part.type == 'text' %}{{- part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{%- if message.role == 'assistant' %}{{- '<|END_RESPONSE|>' }}{% endif %}
{{- '<|END_OF_TURN_TOKEN|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>' }}
{%- endif %}
"""


def _config(vocabulary: Vocabulary) -> Json:
    return {
        "architectures": ["AyaVisionForConditionalGeneration"],
        "model_type": "aya_vision",
        "image_token_index": vocabulary.id("<|IMG_PATCH|>"),
        "downsample_factor": 2,
        "alignment_intermediate_size": 64,
        "adapter_layer_norm_eps": 1e-6,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "text_config": {
            "model_type": "cohere2",
            "vocab_size": len(vocabulary),
            "hidden_size": 64,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_theta": 50000.0,
            "layer_norm_eps": 1e-5,
            "logit_scale": 1.0,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 4,
            "max_position_embeddings": MAX_POSITIONS,
        },
        "vision_config": vit("siglip_vision_model", PATCH, image_size=TILE_PIXELS),
    }


def _describe(vocabulary: Vocabulary) -> Checkpoint:
    return Checkpoint(
        config=_config(vocabulary),
        template=TEMPLATE,
        eos=("<|END_OF_TURN_TOKEN|>",),
        pad="<PAD>",
        files={
            "preprocessor_config.json": {
                "image_processor_type": "GotOcr2ImageProcessor",
                "processor_class": "AyaVisionProcessor",
                "crop_to_patches": True,
                "min_patches": 1,
                "max_patches": 3,
                "size": {"height": TILE_PIXELS, "width": TILE_PIXELS},
                "image_mean": [0.5] * 3,
                "image_std": [0.5] * 3,
            },
            "processor_config.json": {
                "processor_class": "AyaVisionProcessor",
                "patch_size": PATCH,
                "img_size": TILE_PIXELS,
                "downsample_factor": 2,
                "image_token": "<image>",
            },
        },
        style=Style(tied_head=True),
    )


AYA_VISION = Family(SPECIALS, _describe, bos="<BOS_TOKEN>")
