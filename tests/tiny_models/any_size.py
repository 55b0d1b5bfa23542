"""Images of any size, padded to the largest, or of any shape, resampled to as many tokens."""

from __future__ import annotations

from typing import Any

from tests.tiny_models import chatml
from tests.tiny_models.checkpoint import Family
from tests.tiny_models.llama import llama, vit
from tests.tiny_models.vision_language import images, processor, vision_family, words

SPECIALS = words(
    "<unk> <s> </s> <pad> [INST] [/INST] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [IMG] [IMG_BREAK] "
    "[IMG_END]"
)
CONTENT = """\
{%- macro render(content) -%}
{%- if content is string %}{{- content }}
{%- else %}
{%- for part in content %}
{%- if part.type == 'text' %}{{- part.text }}
{%- elif part.type in ('image', 'image_url') %}{{- '[IMG]' }}
{%- endif %}
{%- endfor %}
{%- endif %}
{%- endmacro -%}
{{- bos_token }}
"""
PIXTRAL_MESSAGES = """\
{%- set system = render(messages[0].content) + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- for message in messages if message.role != 'system' %}
{%- if message.role == 'user' %}
{{- '[INST]' + (system if loop.last else '') + render(message.content) + '[/INST]' }}
{%- else %}{{- render(message.content) + eos_token }}
{%- endif %}
{%- endfor %}
"""
MISTRAL3_MESSAGES = """\
{%- for message in messages %}
{%- if message.role == 'system' %}
{{- '[SYSTEM_PROMPT]' + render(message.content) + '[/SYSTEM_PROMPT]' }}
{%- elif message.role == 'user' %}{{- '[INST]' + render(message.content) + '[/INST]' }}
{%- else %}{{- render(message.content) + eos_token }}
{%- endif %}
{%- endfor %}
"""


def _mistral(
    architecture: str,
    model_type: str,
    template: str,
    patch: int,
    longest_edge: int,
    merge: int,
    **config: Any,
) -> Family:
    """A family whose rows of patches end in a break token."""
    return vision_family(
        SPECIALS,
        architecture,
        model_type,
        llama("mistral"),
        images(
            "Pixtral",
            patch_size={"height": patch, "width": patch},
            size={"longest_edge": longest_edge},
        )
        | processor(
            "Pixtral",
            image_token="[IMG]",
            image_break_token="[IMG_BREAK]",
            image_end_token="[IMG_END]",
            patch_size=patch,
            spatial_merge_size=merge,
        ),
        template=CONTENT + template,
        ids={"image_token_index": "[IMG]"},
        eos=("</s>",),
        pad="<pad>",
        bos="<s>",
        vision_feature_layer=-1,
        vision_config=vit(
            "pixtral", patch, head_dim=16, image_size=longest_edge, rope_theta=10000.0
        ),
        **config,
    )


PIXTRAL = _mistral(
    "LlavaForConditionalGeneration",
    "pixtral",
    PIXTRAL_MESSAGES,
    patch=20,
    longest_edge=320,
    merge=1,
    vision_feature_select_strategy="full",
)
MISTRAL3 = _mistral(
    "Mistral3ForConditionalGeneration",
    "mistral3",
    MISTRAL3_MESSAGES,
    patch=14,
    longest_edge=280,
    merge=2,
    spatial_merge_size=2,
)

PATCH = 14
TOKENS_PER_IMAGE = 8
MINICPMO = vision_family(
    (*chatml.SPECIALS, *words("<unk> <image> </image> <slice> </slice>")),
    "MiniCPMO",
    "minicpmo",
    llama(
        hidden_size=128,
        num_hidden_layers=3,
        rope_scaling={"rope_type": "default", "mrope_section": [4, 2, 2]},
    ),
    images(
        "MiniCPMO",
        "MiniCPMV",
        image_feature_size=TOKENS_PER_IMAGE,
        patch_size=PATCH,
        scale_resolution=4 * PATCH,
        norm_mean=[0.5] * 3,
        norm_std=[0.5] * 3,
    ),
    template=chatml.OF_TEXTS,
    is_flat=True,
    query_num=TOKENS_PER_IMAGE,
    image_size=4 * PATCH,
    patch_size=PATCH,
    init_audio=False,
    init_tts=False,
    slice_mode=False,
    vision_config=vit("siglip_vision_model", PATCH, image_size=8 * PATCH),
)
