"""The Qwen-VL line: rows of patches with a grid per image, M-RoPE positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.tiny_models.checkpoint import Checkpoint, Family, Json
from tests.tiny_models.llama import SIZES
from tests.tiny_models.vision_language import words
from tests.tiny_models.vocabulary import Vocabulary

SPECIALS = words(
    "<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|vision_pad|> "
    "<|image_pad|> <|video_pad|>"
)
THINK = ("<think>", "</think>")
EOS = ("<|im_end|>", "<|endoftext|>")
MERGE = 2
MAX_MERGED_PATCHES = 1280

CONTENT = """\
{%- macro render(content) -%}
{%- if content is string %}{{- content }}
{%- else %}
{%- for part in content %}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' or 'video' in part %}
{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif 'text' in part %}{{- part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{%- endmacro -%}
"""
DEFAULT_SYSTEM = """\
{%- if messages[0].role != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
"""
MESSAGES = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + render(message.content) + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
THINKING = """\
{%- if add_generation_prompt %}
{%- set thinks = enable_thinking is defined and enable_thinking %}
{{- '<think>\\n' if thinks else '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
"""


def _ids(vocabulary: Vocabulary) -> Json:
    return {
        "vocab_size": len(vocabulary),
        "image_token_id": vocabulary.id("<|image_pad|>"),
        "video_token_id": vocabulary.id("<|video_pad|>"),
        "vision_start_token_id": vocabulary.id("<|vision_start|>"),
        "vision_end_token_id": vocabulary.id("<|vision_end|>"),
    }


def _processors(patch: int, mean: float, std: float) -> dict[str, Json]:
    block = (patch * MERGE) ** 2
    common: Json = {
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "image_mean": [mean] * 3,
        "image_std": [std] * 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": True,
    }
    image: Json = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 4 * block,
        "max_pixels": MAX_MERGED_PATCHES * block,
    }
    video: Json = {
        "video_processor_type": "Qwen2VLVideoProcessor",
        "size": {"shortest_edge": 4 * block, "longest_edge": MAX_MERGED_PATCHES * block},
        "fps": 2.0,
        "min_frames": 2,
        "max_frames": 16,
    }
    return {
        "preprocessor_config.json": common | image,
        "video_preprocessor_config.json": common | video,
    }


def _checkpoint(config: Json, template: str, processors: dict[str, Json]) -> Checkpoint:
    return Checkpoint(
        config=config, template=template, eos=EOS, pad="<|endoftext|>", files=processors
    )


def _text(**sizes: Any) -> Json:
    norms = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}
    return SIZES | norms | sizes


def _vision(model_type: str, patch: int, **sizes: Any) -> Json:
    return {
        "model_type": model_type,
        "depth": 3,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": patch,
        "spatial_patch_size": patch,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
    } | sizes


def _chunked_mrope(*section: int) -> Json:
    return {
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": list(section)},
    }


def _qwen2_vl(vocabulary: Vocabulary) -> Checkpoint:
    config: Json = {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "vision_config": _vision("qwen2_vl", 14, embed_dim=32, hidden_size=64, mlp_ratio=2),
    }
    return _checkpoint(
        config | _ids(vocabulary) | _text() | _chunked_mrope(2, 3, 3),
        CONTENT + DEFAULT_SYSTEM + MESSAGES,
        _processors(14, 0.45, 0.27),
    )


def _qwen2_5(vocabulary: Vocabulary, text: Json, vision: Json) -> Checkpoint:
    config: Json = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "vision_config": vision,
    }
    return _checkpoint(
        config | _ids(vocabulary) | text,
        CONTENT + DEFAULT_SYSTEM + MESSAGES,
        _processors(14, 0.45, 0.27),
    )


def _qwen2_5_vl(vocabulary: Vocabulary) -> Checkpoint:
    vision = _vision(
        "qwen2_5_vl",
        14,
        hidden_size=32,
        intermediate_size=64,
        out_hidden_size=64,
        window_size=112,
        fullatt_block_indexes=[1],
    )
    return _qwen2_5(vocabulary, _text() | _chunked_mrope(2, 3, 3), vision)


def _qwen2_5_vl_mid(vocabulary: Vocabulary) -> Checkpoint:
    """36 M parameters: large enough that what an image costs can be measured on a CPU."""
    text = _text(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8
    )
    vision = _vision(
        "qwen2_5_vl",
        14,
        depth=8,
        num_heads=4,
        hidden_size=320,
        intermediate_size=864,
        out_hidden_size=512,
        window_size=112,
        fullatt_block_indexes=[1, 3, 5, 7],
    )
    return _qwen2_5(vocabulary, text | _chunked_mrope(8, 12, 12), vision)


def _qwen2_5_vl_agent(vocabulary: Vocabulary) -> Checkpoint:
    """Few parameters with much KV: 8 KiB per token in float32, a fourteenth of Qwen3-VL 2B's."""
    text = _text(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=40960,
    )
    vision = _vision(
        "qwen2_5_vl",
        14,
        hidden_size=32,
        intermediate_size=64,
        out_hidden_size=256,
        window_size=112,
        fullatt_block_indexes=[1],
    )
    return _qwen2_5(vocabulary, text | _chunked_mrope(16, 24, 24), vision)


def _qwen3_vision(model_type: str, deepstack: list[int]) -> Json:
    return _vision(
        model_type,
        16,
        hidden_size=32,
        intermediate_size=64,
        out_hidden_size=64,
        num_position_embeddings=64,
        deepstack_visual_indexes=deepstack,
        hidden_act="gelu_pytorch_tanh",
    )


def _qwen3(vocabulary: Vocabulary, model_type: str, architecture: str, **text: Any) -> Checkpoint:
    config: Json = {
        "architectures": [architecture],
        "model_type": model_type,
        "tie_word_embeddings": False,
        "text_config": _text(
            model_type=f"{model_type}_text",
            vocab_size=len(vocabulary),
            head_dim=16,
            attention_bias=False,
            rope_theta=5000000.0,
            rope_scaling={
                "rope_type": "default",
                "mrope_interleaved": True,
                "mrope_section": [4, 2, 2],
            },
            **text,
        ),
        "vision_config": _qwen3_vision(model_type, deepstack=[0, 1]),
    }
    return _checkpoint(config | _ids(vocabulary), CONTENT + MESSAGES, _processors(16, 0.5, 0.5))


def _qwen3_vl(vocabulary: Vocabulary) -> Checkpoint:
    return _qwen3(vocabulary, "qwen3_vl", "Qwen3VLForConditionalGeneration")


def _qwen3_vl_moe(vocabulary: Vocabulary) -> Checkpoint:
    return _qwen3(
        vocabulary,
        "qwen3_vl_moe",
        "Qwen3VLMoeForConditionalGeneration",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
    )


def _qwen3_hybrid(
    vocabulary: Vocabulary, model_type: str, architecture: str, **further: Any
) -> Checkpoint:
    text = _text(
        model_type=f"{model_type}_text",
        vocab_size=len(vocabulary),
        head_dim=32,
        attention_bias=False,
        full_attention_interval=2,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_conv_kernel_dim=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=16,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000000.0,
            "partial_rotary_factor": 0.5,
            "mrope_interleaved": True,
            "mrope_section": [4, 2, 2],
        },
        **further,
    )
    config: Json = {
        "architectures": [architecture],
        "model_type": model_type,
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": _qwen3_vision(model_type, deepstack=[]),
    }
    return _checkpoint(
        config | _ids(vocabulary), CONTENT + MESSAGES + THINKING, _processors(16, 0.5, 0.5)
    )


def _qwen3_5(vocabulary: Vocabulary) -> Checkpoint:
    return _qwen3_hybrid(vocabulary, "qwen3_5", "Qwen3_5ForConditionalGeneration")


def _qwen3_5_moe(vocabulary: Vocabulary) -> Checkpoint:
    return _qwen3_hybrid(
        vocabulary,
        "qwen3_5_moe",
        "Qwen3_5MoeForConditionalGeneration",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )


def _qwen3_omni_moe(vocabulary: Vocabulary) -> Checkpoint:
    """Qwen3-Omni without its voice; the model that looks and writes is a part of it."""
    moe = _qwen3_vl_moe(vocabulary)
    inner: Json = dict(moe.config)
    inner["text_config"] = inner["text_config"] | {"model_type": "qwen3_omni_moe_text"}
    inner["vision_config"] = _qwen3_vision("qwen3_omni_moe_vision_encoder", deepstack=[0, 1])
    inner["audio_config"] = {
        "d_model": 32,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "num_mel_bins": 16,
        "output_dim": 64,
        "downsample_hidden_size": 8,
    }
    inner |= {"model_type": "qwen3_omni_moe_thinker", "audio_token_id": vocabulary.id("<|audio|>")}
    settings = moe.files["preprocessor_config.json"]
    audio = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16}
    return replace(
        moe,
        config={
            "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
            "model_type": "qwen3_omni_moe",
            "enable_audio_output": False,
            "thinker_config": inner,
            "talker_config": {"text_config": inner["text_config"]},
        },
        files={"preprocessor_config.json": settings | audio},
        tokens={
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "audio_token": "<|audio|>",
            "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>",
            "audio_bos_token": "<|vision_start|>",
            "audio_eos_token": "<|vision_end|>",
        },
    )


QWEN2_VL = Family(SPECIALS, _qwen2_vl)
QWEN2_5_VL = Family(SPECIALS, _qwen2_5_vl)
QWEN2_5_VL_MID = Family(SPECIALS, _qwen2_5_vl_mid)
QWEN2_5_VL_AGENT = Family(SPECIALS, _qwen2_5_vl_agent)
QWEN3_VL = Family(SPECIALS, _qwen3_vl)
QWEN3_VL_MOE = Family(SPECIALS, _qwen3_vl_moe)
QWEN3_OMNI_MOE = Family((*SPECIALS, "<|audio|>"), _qwen3_omni_moe)
QWEN3_5 = Family(SPECIALS + THINK, _qwen3_5)
QWEN3_5_MOE = Family(SPECIALS + THINK, _qwen3_5_moe)
