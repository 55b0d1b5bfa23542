"""Pixtral and Mistral 3: images of any size, padded to the largest; rows end in a break token."""

from __future__ import annotations

from tests.tiny_models.checkpoint import Checkpoint, Family, Json
from tests.tiny_models.llama import llama
from tests.tiny_models.vocabulary import Vocabulary

SPECIALS = (
    "<unk>",
    "<s>",
    "</s>",
    "<pad>",
    "[INST]",
    "[/INST]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
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


def _vision(patch: int, longest_edge: int) -> Json:
    return {
        "model_type": "pixtral",
        "hidden_size": 32,
        "head_dim": 16,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_channels": 3,
        "image_size": longest_edge,
        "patch_size": patch,
        "rope_theta": 10000.0,
    }


def _processors(patch: int, longest_edge: int, merge: int) -> dict[str, Json]:
    return {
        "preprocessor_config.json": {
            "image_processor_type": "PixtralImageProcessor",
            "processor_class": "PixtralProcessor",
            "patch_size": {"height": patch, "width": patch},
            "size": {"longest_edge": longest_edge},
        },
        "processor_config.json": {
            "processor_class": "PixtralProcessor",
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
            "patch_size": patch,
            "spatial_merge_size": merge,
        },
    }


def _checkpoint(
    config: Json, vocabulary: Vocabulary, template: str, patch: int, edge: int, merge: int
) -> Checkpoint:
    common: Json = {
        "vocab_size": len(vocabulary),
        "image_token_index": vocabulary.id("[IMG]"),
        "vision_feature_layer": -1,
        "text_config": llama(len(vocabulary), model_type="mistral"),
        "vision_config": _vision(patch, edge),
    }
    return Checkpoint(
        config=common | config,
        template=CONTENT + template,
        eos=("</s>",),
        pad="<pad>",
        files=_processors(patch, edge, merge),
    )


def _pixtral(vocabulary: Vocabulary) -> Checkpoint:
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "pixtral",
        "vision_feature_select_strategy": "full",
    }
    return _checkpoint(config, vocabulary, PIXTRAL_MESSAGES, patch=20, edge=320, merge=1)


def _mistral3(vocabulary: Vocabulary) -> Checkpoint:
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "spatial_merge_size": 2,
    }
    return _checkpoint(config, vocabulary, MISTRAL3_MESSAGES, patch=14, edge=280, merge=2)


PIXTRAL = Family(SPECIALS, _pixtral, bos="<s>")
MISTRAL3 = Family(SPECIALS, _mistral3, bos="<s>")
