"""Gemma 4: an image's tokens see each other, so its prompts are not cut before their end.

Images of any shape within a budget; windows in two of three layers, inputs for each layer of
its own, and last layers that use the keys and values of earlier ones.
"""

from __future__ import annotations

from dataclasses import replace

from tests.tiny_models.checkpoint import Checkpoint
from tests.tiny_models.llama import decoder
from tests.tiny_models.vision_language import processor, vision_family, words
from tests.tiny_models.vocabulary import Vocabulary
from tests.tiny_models.weights import Style

SPECIALS = words(
    "<pad> <eos> <bos> <unk> <|turn> <turn|> <|image> <|image|> <image|> <|audio|> <|video|>"
)
PATCH_PIXELS = 8
MAX_TOKENS_PER_IMAGE = 20

TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}
{{- '<|turn>' + role + '\\n' }}
{%- if message.content is string %}{{- message.content | trim }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<|image|>' }}
{%- elif part.type == 'text' %}{{- part.text | trim }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|turn>model\\n' }}
{%- endif %}
"""

GEMMA4 = vision_family(
    SPECIALS,
    "Gemma4ForConditionalGeneration",
    "gemma4",
    decoder(
        "gemma4_text",
        hidden_size_per_layer_input=32,
        num_hidden_layers=6,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1_000_000.0,
                "partial_rotary_factor": 0.25,
            },
        },
        head_dim=16,
        global_head_dim=32,
        sliding_window=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        use_bidirectional_attention="vision",
    ),
    processor(
        "Gemma4",
        image_processor={
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": PATCH_PIXELS,
            "max_soft_tokens": MAX_TOKENS_PER_IMAGE,
        },
        feature_extractor={
            "feature_extractor_type": "Gemma4AudioFeatureExtractor",
            "feature_size": 16,
        },
    ),
    template=TEMPLATE,
    ids={
        "image_token_id": "<|image|>",
        "audio_token_id": "<|audio|>",
        "video_token_id": "<|video|>",
        "boi_token_id": "<|image>",
        "eoi_token_id": "<image|>",
    },
    tokens={
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "image_token": "<|image|>",
        "video_token": "<|video|>",
    },
    eos=("<turn|>", "<eos>"),
    pad="<pad>",
    bos="<bos>",
    style=Style(tied_head=True),
    size_names=("vocab_size", "vocab_size_per_layer_input"),
    hidden_size=64,
    vision_soft_tokens_per_image=MAX_TOKENS_PER_IMAGE,
    audio_config=None,
    vision_config={
        "model_type": "gemma4_vision",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 16,
        "patch_size": PATCH_PIXELS,
        "position_embedding_size": 128,
        "default_output_length": MAX_TOKENS_PER_IMAGE,
    },
)


def _unified(vocabulary: Vocabulary) -> Checkpoint:
    """Patches of the image itself take the place of a vision tower."""
    gemma4 = GEMMA4.describe(vocabulary)
    text = gemma4.config["text_config"] | {
        "model_type": "gemma4_unified_text",
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    }
    patches = {"patch_size": 16, "pooling_kernel_size": 3}
    vision = patches | {
        "model_type": "gemma4_unified_vision",
        "mm_embed_dim": 32,
        "mm_posemb_size": 32,
        "num_soft_tokens": MAX_TOKENS_PER_IMAGE,
        "output_proj_dims": 32,
    }
    config = gemma4.config | {
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "model_type": "gemma4_unified",
        "text_config": text,
        "vision_config": vision,
    }
    images = patches | {
        "image_processor_type": "Gemma4UnifiedImageProcessor",
        "max_soft_tokens": MAX_TOKENS_PER_IMAGE,
    }
    return replace(gemma4, config=config, files=processor("Gemma4Unified", image_processor=images))


GEMMA4_UNIFIED = replace(GEMMA4, describe=_unified)
