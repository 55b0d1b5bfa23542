"""PaddleOCR-VL: rows of patches with a grid per image; M-RoPE over each whole head."""

from __future__ import annotations

from tests.tiny_models.checkpoint import Checkpoint, Family, Json
from tests.tiny_models.llama import llama
from tests.tiny_models.vocabulary import Vocabulary

SPECIALS = (
    "<unk>",
    "<s>",
    "</s>",
    "<|end_of_sentence|>",
    "<|IMAGE_START|>",
    "<|IMAGE_PLACEHOLDER|>",
    "<|IMAGE_END|>",
    "<|video_pad|>",
)
PATCH = 14
MERGE = 2

TEMPLATE = """\
{{- '<s>' }}
{%- for message in messages %}
{{- 'User: ' if message.role == 'user' else 'Assistant: ' if message.role == 'assistant' else '' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>' }}
{%- elif part.type == 'text' %}{{- part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '</s>' if message.role == 'assistant' else '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- 'Assistant: ' }}
{%- endif %}
"""


def _config(vocabulary: Vocabulary) -> Json:
    text = llama(
        len(vocabulary),
        num_hidden_layers=2,
        hidden_size=1024,  # mlx-vlm's projector knows no other
        rope_scaling={"rope_type": "default", "type": "default", "mrope_section": [2, 3, 3]},
        use_bias=False,
    )
    return text | {
        "architectures": ["PaddleOCRVLForConditionalGeneration"],
        "model_type": "paddleocr_vl",
        "image_token_id": vocabulary.id("<|IMAGE_PLACEHOLDER|>"),
        "video_token_id": vocabulary.id("<|video_pad|>"),
        "vision_start_token_id": vocabulary.id("<|IMAGE_START|>"),
        "vision_end_token_id": vocabulary.id("<|IMAGE_END|>"),
        "vision_config": {
            "model_type": "paddleocr_vl",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_channels": 3,
            "image_size": 8 * PATCH,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
        },
    }


def _describe(vocabulary: Vocabulary) -> Checkpoint:
    return Checkpoint(
        config=_config(vocabulary),
        template=TEMPLATE,
        eos=("</s>",),
        pad="<unk>",
        tokens={"image_token": "<|IMAGE_PLACEHOLDER|>"},
        files={
            "preprocessor_config.json": {
                "image_processor_type": "PaddleOCRVLImageProcessor",
                "processor_class": "PaddleOCRVLProcessor",
                "patch_size": PATCH,
                "temporal_patch_size": 1,
                "merge_size": MERGE,
                "min_pixels": 4 * (PATCH * MERGE) ** 2,
                "max_pixels": 256 * (PATCH * MERGE) ** 2,
            }
        },
    )


PADDLEOCR_VL = Family(SPECIALS, _describe, bos="<s>")
