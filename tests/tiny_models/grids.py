"""Families that see an image at its own shape, as rows of patches, with a grid per image."""

from __future__ import annotations

from dataclasses import replace

from tests.tiny_models import chatml
from tests.tiny_models.checkpoint import Checkpoint, Family, Json
from tests.tiny_models.llama import decoder, llama, vit
from tests.tiny_models.text_parts import INDEXED, LATENT, ROUTED
from tests.tiny_models.text_recurrent import RECURRENT
from tests.tiny_models.vision_language import HALF, images, vision_family, words
from tests.tiny_models.vocabulary import Vocabulary

PATCH = 14
MERGE = 2
BLOCK_PIXELS = (PATCH * MERGE) ** 2
BLOCKS: Json = {
    "patch_size": PATCH,
    "temporal_patch_size": 1,
    "merge_size": MERGE,
    "min_pixels": 4 * BLOCK_PIXELS,
    "max_pixels": 256 * BLOCK_PIXELS,
}

PADDLEOCR_VL = vision_family(
    words(
        "<unk> <s> </s> <|end_of_sentence|> <|IMAGE_START|> <|IMAGE_PLACEHOLDER|> <|IMAGE_END|> "
        "<|video_pad|>"
    ),
    "PaddleOCRVLForConditionalGeneration",
    "paddleocr_vl",
    llama(
        num_hidden_layers=2,
        hidden_size=1024,  # mlx-vlm's projector knows no other
        rope_scaling={"rope_type": "default", "type": "default", "mrope_section": [2, 3, 3]},
        use_bias=False,
    ),
    images("PaddleOCRVL", **BLOCKS),
    template=chatml.turns(
        "'User: ' if message.role == 'user' else "
        "'Assistant: ' if message.role == 'assistant' else ''",
        "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        "'</s>' if message.role == 'assistant' else '\\n'",
        "'Assistant: '",
        before="'<s>'",
    ),
    ids={
        "image_token_id": "<|IMAGE_PLACEHOLDER|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|IMAGE_START|>",
        "vision_end_token_id": "<|IMAGE_END|>",
    },
    tokens={"image_token": "<|IMAGE_PLACEHOLDER|>"},
    eos=("</s>",),
    pad="<unk>",
    bos="<s>",
    is_flat=True,
    vision_config=vit("paddleocr_vl", PATCH, image_size=8 * PATCH, spatial_merge_size=MERGE),
)
"""M-RoPE over each whole head."""
DOTS_OCR = vision_family(
    words(
        "[PAD] <|endoftext|> <|user|> <|endofuser|> <|assistant|> <|endofassistant|> <|system|> "
        "<|endofsystem|> <|img|> <|imgpad|> <|endofimg|> <|video_pad|>"
    ),
    "DotsOCRForCausalLM",
    "dots_ocr",
    llama(attention_bias=True),
    images("DotsVL", "Qwen2VL", **BLOCKS),
    template=chatml.turns(
        "'<|' + message.role + '|>'",
        "<|img|><|imgpad|><|endofimg|>",
        "'<|endof' + message.role + '|>'",
        "'<|assistant|>'",
    ),
    ids={"image_token_id": "<|imgpad|>", "video_token_id": "<|video_pad|>"},
    tokens={"image_token": "<|imgpad|>", "video_token": "<|video_pad|>"},
    eos=("<|endofassistant|>", "<|endoftext|>"),
    pad="[PAD]",
    is_flat=True,
    vision_config={
        "embed_dim": 32,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_channels": 3,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 1,
    },
)

KIMI_TEMPLATE = """\
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
KIMI_VL = vision_family(
    words(
        "[BOS] [EOS] [PAD] <|im_end|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> "
        "<|media_start|> <|media_content|> <|media_end|> <|media_pad|>"
    ),
    "KimiVLForConditionalGeneration",
    "kimi_vl",
    decoder(
        "deepseek_v3",
        moe_intermediate_size=32,
        num_hidden_layers=3,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        rms_norm_eps=1e-5,
        rope_theta=800000.0,
        **LATENT | {"q_lora_rank": None},
    ),
    images(
        "KimiVL",
        patch_size=PATCH,
        merge_kernel_size=[MERGE, MERGE],
        in_token_limit=1024,
        pad_input=True,
        **HALF,
    ),
    template=KIMI_TEMPLATE,
    ids={"media_placeholder_token_id": "<|media_pad|>"},
    eos=("<|im_end|>", "[EOS]"),
    pad="[PAD]",
    vision_config={
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
)
"""Latent attention, and experts."""


def _kimi_k25(vocabulary: Vocabulary) -> Checkpoint:
    vl = KIMI_VL.describe(vocabulary)
    names = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
    settings = {
        "patch_size": PATCH,
        "merge_kernel_size": MERGE,
        "in_patch_limit": 1024,
        "patch_limit_on_one_side": 64,
        **HALF,
    }
    files = {"preprocessor_config.json": {"media_proc_cfg": settings}}
    return replace(vl, config=vl.config | names, files=files)


KIMI_K25 = Family(KIMI_VL.specials, _kimi_k25)
GLM5_NEXT = vision_family(
    (
        *chatml.SPECIALS,
        *words("<|image|> <|begin_of_image|> <|end_of_image|> <|begin_of_video|> <|end_of_video|>"),
    ),
    "Glm5NextForConditionalGeneration",
    "glm5_next",
    decoder(
        "glm5_next_text",
        **ROUTED
        | LATENT
        | INDEXED
        | {
            "num_hidden_layers": 3,
            "qk_rope_head_dim": 0,
            "index_kpool": 4,
            "linear_attn_config": {"head_dim": 32, "num_heads": 2, "short_conv_kernel_size": 4},
            "layer_types": ["linear_attention", *["deepseek_sparse_attention"] * 2],
            "indexer_types": ["full", "full", "shared"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "hc_mult": 2,
            "hc_sinkhorn_iters": 2,
        },
    ),
    {
        "processor_config.json": {
            "image_processor": {"patch_size": PATCH, "min_image_tokens": 4, "max_image_tokens": 64}
        }
    },
    template=chatml.chatml("<|begin_of_image|><|image|><|end_of_image|>"),
    ids={
        "image_token_id": "<|image|>",
        "image_start_token_id": "<|begin_of_image|>",
        "image_end_token_id": "<|end_of_image|>",
        "video_start_token_id": "<|begin_of_video|>",
        "video_end_token_id": "<|end_of_video|>",
    },
    has_size=False,
    vision_config={
        "model_type": "glm5_next_vision",
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "image_size": 112,
        "patch_size": PATCH,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "projection_intermediate_size": 64,
    },
)
"""Linear attention, attention to the keys that an index chooses, and experts."""


def _nemotron_omni(vocabulary: Vocabulary) -> Checkpoint:
    text = RECURRENT["nemotron_h"].describe(vocabulary)
    config = {
        "architectures": ["NemotronH_Nano_Omni_Reasoning_V3"],
        "model_type": "NemotronH_Nano_Omni_Reasoning_V3",
        "vocab_size": len(vocabulary),
        "img_context_token_id": vocabulary.id("<image>"),
        "vit_hidden_size": 32,
        "projector_hidden_size": 64,
        "ps_version": "v2",
        "llm_config": text.config,
        "vision_config": {
            "model_type": "radio",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "image_size": 64,
            "max_resolution": 128,
            "patch_size": 16,
        },
    }
    settings = {
        "norm_mean": [0.5] * 3,
        "norm_std": [0.5] * 3,
        "patch_size": 16,
        "downsample_ratio": 0.5,
        "min_num_patches": 16,
        "max_num_patches": 256,
        "max_model_len": 8192,
    }
    files = {"preprocessor_config.json": settings}
    return replace(text, config=config, template=chatml.chatml("<image>"), files=files)


NEMOTRON_OMNI = Family((*chatml.SPECIALS, "<image>", "<img>", "</img>"), _nemotron_omni)
"""Layers of Mamba 2, attention and experts."""
