"""Families that cut an image into tiles of one size by its shape, and see a small copy of it."""

from __future__ import annotations

from dataclasses import replace

from tests.tiny_models import chatml
from tests.tiny_models.checkpoint import Checkpoint, Family
from tests.tiny_models.llama import decoder, llama, vit
from tests.tiny_models.vision_language import HALF, images, processor, square, vision_family, words
from tests.tiny_models.vocabulary import Vocabulary
from tests.tiny_models.weights import Style

TILE = 56
PATCH = 14
MAX_TILES = 4

AYA_TEMPLATE = """\
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
AYA_VISION = vision_family(
    words(
        "<PAD> <BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|USER_TOKEN|> "
        "<|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|> <|START_RESPONSE|> <|END_RESPONSE|> <|START_OF_IMG|> "
        "<|END_OF_IMG|> <|IMG_PATCH|> <|IMG_LINE_BREAK|> TILE TILE_GLOBAL"
    ),
    "AyaVisionForConditionalGeneration",
    "aya_vision",
    decoder(
        "cohere2",
        head_dim=16,
        rope_theta=50000.0,
        layer_norm_eps=1e-5,
        logit_scale=1.0,
        sliding_window=48,
        sliding_window_pattern=4,
    ),
    images(
        "AyaVision",
        "GotOcr2",
        crop_to_patches=True,
        min_patches=1,
        max_patches=3,
        size=square(TILE),
        **HALF,
    )
    | processor(
        "AyaVision", patch_size=PATCH, img_size=TILE, downsample_factor=2, image_token="<image>"
    ),
    template=AYA_TEMPLATE,
    ids={"image_token_index": "<|IMG_PATCH|>"},
    eos=("<|END_OF_TURN_TOKEN|>",),
    pad="<PAD>",
    bos="<BOS_TOKEN>",
    style=Style(tied_head=True),
    has_size=False,
    downsample_factor=2,
    alignment_intermediate_size=64,
    adapter_layer_norm_eps=1e-6,
    vision_feature_layer=-1,
    vision_feature_select_strategy="full",
    vision_config=vit("siglip_vision_model", PATCH, image_size=TILE),
)
"""Cohere's layers, three of four with a sliding window."""
INTERNVL = vision_family(
    (*chatml.SPECIALS, *words("<img> </img> <IMG_CONTEXT> <image> <video>")),
    "InternVLForConditionalGeneration",
    "internvl",
    llama("qwen3"),
    images(
        "InternVL",
        "GotOcr2",
        size=square(TILE),
        min_patches=1,
        max_patches=MAX_TILES,
        crop_to_patches=True,
    )
    | processor("InternVL", image_seq_length=(TILE // PATCH // 2) ** 2),
    template=chatml.chatml("<IMG_CONTEXT>\n"),
    ids={"image_token_id": "<IMG_CONTEXT>"},
    tokens={
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
    has_size=False,
    downsample_ratio=0.5,
    max_dynamic_patch=MAX_TILES,
    min_dynamic_patch=1,
    use_thumbnail=True,
    vision_config=vit(
        "internvl_vision",
        [PATCH, PATCH],
        image_size=[TILE, TILE],
        layer_scale_init_value=1.0,
        norm_type="layer_norm",
        attention_bias=True,
        use_qk_norm=False,
    ),
)


def _internvl_qwen2(vocabulary: Vocabulary) -> Checkpoint:
    internvl = INTERNVL.describe(vocabulary)
    text = internvl.config["text_config"] | {"model_type": "qwen2"}
    return replace(internvl, config=internvl.config | {"text_config": text})


def _internvl_chat(vocabulary: Vocabulary) -> Checkpoint:
    """InternVL 3 and 3.5 as OpenGVLab writes them; they name no image token."""
    internvl = INTERNVL.describe(vocabulary)
    text = internvl.config["text_config"] | {"attention_bias": False}
    tower = {"model_type": "intern_vit_6b", "image_size": TILE, "patch_size": PATCH}
    config = internvl.config | {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "force_image_size": TILE,
        "llm_config": text,
        "text_config": text,
        "vision_config": internvl.config["vision_config"] | tower,
    }
    del config["image_token_id"]
    return replace(
        internvl,
        config=config,
        template=chatml.chatml("<image>\n"),
        tokens={},
        files={"preprocessor_config.json": {"crop_size": TILE}},
    )


INTERNVL_QWEN2 = Family(INTERNVL.specials, _internvl_qwen2)
INTERNVL_CHAT = Family(INTERNVL.specials, _internvl_chat)
LLAMA4 = vision_family(
    (
        *chatml.SPECIALS,
        *words("<|image|> <|image_start|> <|image_end|> <|patch|>"),
        *words("<|tile_x_separator|> <|tile_y_separator|>"),
    ),
    "Llama4ForConditionalGeneration",
    "llama4",
    llama(
        "llama4_text",
        num_hidden_layers=5,
        intermediate_size=32,
        intermediate_size_mlp=128,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        use_qk_norm=True,
        attention_chunk_size=24,
        attn_temperature_tuning=True,
        attn_scale=0.5,
        floor_scale=16,
    ),
    images(
        "Llama4",
        image_processor_type="Llama4ImageProcessorFast",
        size=square(TILE),
        max_patches=4,
        **HALF,
    ),
    template=chatml.chatml("<|image|>"),
    ids={"image_token_index": "<|patch|>"},
    has_size=False,
    vision_config={
        "model_type": "llama4_vision_model",
        "hidden_size": 32,
        "image_size": TILE,
        "initializer_range": 0.02,
        "intermediate_size": 128,
        "norm_eps": 1e-5,
        "num_attention_heads": 2,
        "num_channels": 3,
        "num_hidden_layers": 2,
        "patch_size": 14,
        "pixel_shuffle_ratio": 0.5,
        "projector_dropout": 0.0,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
        "rope_theta": 10000,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "vision_output_dim": 64,
    },
)
"""Blocks of attention, and layers without positions."""

MAX_LFM2_TILES = 10
_LFM2_TILES = tuple(
    f"<|img_row_{row}_col_{column}|>"
    for row in range(1, MAX_LFM2_TILES + 1)
    for column in range(1, MAX_LFM2_TILES + 1)
    if row * column <= MAX_LFM2_TILES
)
LFM2_VL = vision_family(
    (
        *words("<|pad|> <|startoftext|> <|im_start|> <|im_end|> <image> <|image_start|>"),
        *words("<|image_end|> <|img_thumbnail|>"),
        *_LFM2_TILES,
    ),
    "Lfm2VlForConditionalGeneration",
    "lfm2_vl",
    decoder(
        "lfm2",
        block_dim=64,
        block_ff_dim=128,
        block_auto_adjust_ff_dim=False,
        conv_dim=64,
        conv_dim_out=64,
        conv_L_cache=3,
        norm_eps=1e-5,
        rope_theta=1_000_000.0,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
    ),
    images(
        "Lfm2Vl",
        image_processor_type="Lfm2VlImageProcessorFast",
        encoder_patch_size=8,
        tile_size=32,
        min_image_tokens=4,
        max_image_tokens=8,
    ),
    template=chatml.chatml("<image>", before="bos_token"),
    ids={"image_token_id": "<image>"},
    tokens={
        "image_token": "<image>",
        "image_start_token": "<|image_start|>",
        "image_end_token": "<|image_end|>",
        "image_thumbnail_token": "<|img_thumbnail|>",
    },
    eos=("<|im_end|>",),
    pad="<|pad|>",
    bos="<|startoftext|>",
    style=Style(tied_head=True, last_norm="model.embedding_norm.weight"),
    has_size=False,
    downsample_factor=2,
    projector_hidden_size=64,
    vision_config=vit("siglip2_vision_model", 8, num_patches=16),
)
"""Short convolutions among the attention layers."""
STEP3P7 = vision_family(
    (
        *chatml.SPECIALS,
        *words("<im_patch> <im_start> <im_end> <patch_start> <patch_end> <patch_newline>"),
    ),
    "Step3p7ForConditionalGeneration",
    "step3p7",
    llama(
        "step3p5",
        num_attention_groups=2,
        moe_intermediate_size=32,
        moe_num_experts=4,
        moe_top_k=2,
        moe_layers_enum="2,3",
        share_expert_dim=32,
        sliding_window=64,
        layer_types=["full_attention", "sliding_attention"] * 2,
        attention_other_setting={"num_attention_heads": 4, "num_attention_groups": 1},
        use_head_wise_attn_gate=True,
        swiglu_limits=[0.0, 0.0, 0.0, 7.0],
        swiglu_limits_shared=[0.0] * 4,
        partial_rotary_factors=[0.5, 1.0] * 2,
    ),
    processor("Step3VL"),
    template=chatml.chatml("<im_patch>"),
    ids={"image_token_id": "<im_patch>"},
    understand_projector_stride=2,
    projector_bias=False,
    vision_config={
        "model_type": "perception_encoder",
        "width": 16,
        "layers": 2,
        "heads": 2,
        "image_size": 728,
        "patch_size": 14,
        "mlp_ratio": 2.0,
        "use_cls_token": False,
    },
)
"""Sliding windows, gates, experts."""
