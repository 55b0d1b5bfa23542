"""Kimi-VL and Kimi K2.5: patches at the image's own size, latent attention, and experts."""

from __future__ import annotations

from dataclasses import replace

from tests.tiny_models.checkpoint import MAX_POSITIONS, Checkpoint, Family, Json
from tests.tiny_models.vocabulary import Vocabulary

SPECIALS = (
    "[BOS]",
    "[EOS]",
    "[PAD]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|media_start|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
)
PATCH = 14
MERGE = 2

TEMPLATE = """\
{%- for message in messages %}
{%- if loop.first and messages[0].role != 'system' %}
{{- '<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>' }}
{%- endif %}
{{- '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' }}
{%- if message.content is string %}{{- message.content + '<|im_end|>' }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}
{{- '<|media_start|>image<|media_content|><|media_pad|><|media_end|>' }}
{%- else %}{{- part.text }}
{%- endif %}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_assistant|>assistant<|im_middle|>' }}
{%- endif %}
"""


def _config(vocabulary: Vocabulary) -> Json:
    return {
        "architectures": ["KimiVLForConditionalGeneration"],
        "model_type": "kimi_vl",
        "vocab_size": len(vocabulary),
        "media_placeholder_token_id": vocabulary.id("<|media_pad|>"),
        "text_config": {
            "model_type": "deepseek_v3",
            "vocab_size": len(vocabulary),
            "hidden_size": 64,
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "n_shared_experts": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 32,
            "q_lora_rank": None,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "rms_norm_eps": 1e-5,
            "rope_theta": 800000.0,
            "max_position_embeddings": MAX_POSITIONS,
        },
        "vision_config": {
            "model_type": "moonvit",
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": PATCH,
            "init_pos_emb_height": 8,
            "init_pos_emb_width": 8,
            "merge_kernel_size": [MERGE, MERGE],
        },
    }


def _describe(vocabulary: Vocabulary) -> Checkpoint:
    return Checkpoint(
        config=_config(vocabulary),
        template=TEMPLATE,
        eos=("<|im_end|>", "[EOS]"),
        pad="[PAD]",
        files={
            "preprocessor_config.json": {
                "image_processor_type": "KimiVLImageProcessor",
                "processor_class": "KimiVLProcessor",
                "patch_size": PATCH,
                "merge_kernel_size": [MERGE, MERGE],
                "in_token_limit": 1024,
                "pad_input": True,
                "image_mean": [0.5] * 3,
                "image_std": [0.5] * 3,
            }
        },
    )


KIMI_VL = Family(SPECIALS, _describe)


def _describe_k25(vocabulary: Vocabulary) -> Checkpoint:
    vl = _describe(vocabulary)
    config = vl.config | {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
    }
    settings = {
        "patch_size": PATCH,
        "merge_kernel_size": MERGE,
        "in_patch_limit": 1024,
        "patch_limit_on_one_side": 64,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    return replace(
        vl, config=config, files={"preprocessor_config.json": {"media_proc_cfg": settings}}
    )


KIMI_K25 = Family(SPECIALS, _describe_k25)
