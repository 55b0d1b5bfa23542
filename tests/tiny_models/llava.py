"""Square images of one size, or tiles of one size chosen by the image's shape: LLaVA's line."""

from __future__ import annotations

from mlx_vlm.models.fastvlm.config import VisionConfig

from tests.tiny_models import chatml
from tests.tiny_models.llama import decoder, llama, vit
from tests.tiny_models.vision_language import HALF, images, processor, square, vision_family, words
from tests.tiny_models.weights import Style

SIDE = 56
PATCH = 14
GRIDS = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
SPARE_ROWS = 8
"""Rows that FastVLM's decoder has beyond those of its tokens."""

TEMPLATE = """\
{%- for message in messages %}
{%- set parts = [{'type': 'text', 'text': message.content}] if message.content is string
   else message.content %}
{%- if message.role != 'system' %}{{- message.role | upper + ': ' }}{% endif %}
{%- for part in parts if part.type == 'image' %}{{- '<image>\\n' }}{% endfor %}
{%- for part in parts if part.type == 'text' %}{{- part.text + ' ' }}{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'ASSISTANT:' }}{% endif %}
"""
ONEVISION_TEMPLATE = """\
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
GRANITE_TEMPLATE = chatml.turns(
    "'<|start_of_role|>' + message.role + '<|end_of_role|>'",
    "<image>",
    "'<|end_of_text|>\\n'",
    "'<|start_of_role|>assistant<|end_of_role|>'",
)
CLIP = vit("clip_vision_model", PATCH, num_hidden_layers=3, image_size=SIDE, projection_dim=32)
CROPS = {"size": {"shortest_edge": SIDE}, "crop_size": square(SIDE)}
LLAVA_PROCESSOR = {
    "image_token": "<image>",
    "num_additional_image_tokens": 1,
    "vision_feature_select_strategy": "default",
}

LLAVA = vision_family(
    words("<unk> <s> </s> <pad> <image>"),
    "LlavaForConditionalGeneration",
    "llava",
    llama(),
    images("Llava", "CLIP", **CROPS) | processor("Llava", patch_size=PATCH, **LLAVA_PROCESSOR),
    template=TEMPLATE,
    ids={"image_token_index": "<image>"},
    tokens={"image_token": "<image>"},
    eos=("</s>",),
    pad="<pad>",
    bos="<s>",
    vision_feature_layer=-2,
    vision_feature_select_strategy="default",
    vision_config=CLIP,
)
LLAVA_NEXT = vision_family(
    (*chatml.SPECIALS, "<image>"),
    "LlavaNextForConditionalGeneration",
    "llava_next",
    llama(),
    images("LlavaNext", image_grid_pinpoints=GRIDS, **CROPS)
    | processor("LlavaNext", patch_size=2 * PATCH, **LLAVA_PROCESSOR),
    template=chatml.chatml("<image>\n"),
    ids={"image_token_index": "<image>"},
    tokens={"image_token": "<image>"},
    image_grid_pinpoints=GRIDS,
    vision_feature_layer=-2,
    vision_feature_select_strategy="default",
    vision_config=CLIP | {"patch_size": 2 * PATCH},
)
"""Square images through CLIP as in LLaVA, then tiles, each row of which ends with a newline."""


def _pinpoints(side: int) -> list[list[int]]:
    return [[rows * side, columns * side] for rows in (1, 2) for columns in (1, 2)]


LLAVA_ONEVISION = vision_family(
    words("<|endoftext|> <|im_start|> <|im_end|> <image> <video>"),
    "LlavaOnevisionForConditionalGeneration",
    "llava_onevision",
    llama("qwen2"),
    images("LlavaOnevision", image_grid_pinpoints=_pinpoints(SIDE), size=square(SIDE), **HALF)
    | processor(
        "LlavaOnevision",
        num_image_tokens=(SIDE // PATCH // 2) ** 2,
        vision_aspect_ratio="anyres_max_9",
        vision_feature_select_strategy="full",
    ),
    template=ONEVISION_TEMPLATE,
    ids={"image_token_index": "<image>", "video_token_index": "<video>"},
    tokens={"image_token": "<image>", "video_token": "<video>"},
    image_grid_pinpoints=_pinpoints(SIDE),
    vision_aspect_ratio="anyres_max_9",
    vision_feature_layer=-1,
    vision_feature_select_strategy="full",
    use_image_newline_parameter=True,
    vision_config=vit("siglip_vision_model", 2 * PATCH, image_size=SIDE, vision_use_head=False),
)
"""A whole image, then tiles of it, each row of which ends with a newline."""

VisionConfig.layers = [1, 1, 1, 1, 1]
VisionConfig.embed_dims = [32, 32, 32, 32, 32]
FASTVLM = vision_family(
    chatml.SPECIALS,
    "LlavaQwen2ForCausalLM",
    "llava_qwen2",
    llama(tie_word_embeddings=True),
    images(
        "Llava",
        "CLIP",
        size={"shortest_edge": 256},
        crop_size=square(256),
        image_mean=[0.0] * 3,
        image_std=[1.0] * 3,
    ),
    template=chatml.OF_TEXTS,
    style=Style(tied_head=True, conv_gain=1.6),
    is_flat=True,
    num_spare=SPARE_ROWS,
    mm_hidden_size=64,
    mm_projector_type="mlp2x_gelu",
    tokenizer_model_max_length=8192,
    vision_config={},
)
"""One id below 0 for an image, in the place of which its features stand. The sizes of its tower
stand in mlx-vlm's code: where this module is imported, they are smaller."""

TILE = 32
GRANITE4_VISION = vision_family(
    words("<|pad|> <|end_of_text|> <|start_of_role|> <|end_of_role|> <image>"),
    "Granite4VisionForConditionalGeneration",
    "granite4_vision",
    decoder(
        "granitemoehybrid",
        shared_intermediate_size=128,
        embedding_multiplier=2.0,
        attention_multiplier=0.25,
        residual_multiplier=0.5,
        logits_scaling=2.0,
        rope_theta=10000.0,
    ),
    images(
        "Granite4Vision",
        "LlavaNext",
        image_grid_pinpoints=_pinpoints(TILE),
        size=square(TILE),
        crop_size=square(TILE),
        do_center_crop=False,
        **HALF,
    )
    | processor(
        "Granite4Vision", patch_size=8, vision_feature_select_strategy="full", image_token="<image>"
    ),
    template=GRANITE_TEMPLATE,
    ids={"image_token_index": "<image>"},
    tokens={"image_token": "<image>"},
    eos=("<|end_of_text|>",),
    pad="<|pad|>",
    image_grid_pinpoints=_pinpoints(TILE),
    vision_feature_select_strategy="full",
    downsample_rate="2/4",
    deepstack_layer_map=[[-2, 0], [-1, 2]],
    use_spatial_sampling=True,
    spatial_target_layers=[1, 2, 3, 3],
    vision_config=vit("siglip_vision_model", 8, hidden_size=64, image_size=TILE),
)
"""Features of several layers of the tower enter at several layers of the decoder."""
