"""PaddleOCR-VL: rows of patches with a grid per image; M-RoPE over each whole head."""

from __future__ import annotations

from tests.tiny_models import chatml
from tests.tiny_models.checkpoint import Checkpoint, Family, Json
from tests.tiny_models.llama import llama, vit
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

TEMPLATE = chatml.turns(
    "'User: ' if message.role == 'user' else 'Assistant: ' if message.role == 'assistant' else ''",
    "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    "'</s>' if message.role == 'assistant' else '\\n'",
    "'Assistant: '",
    before="'<s>'",
)


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
        "vision_config": vit("paddleocr_vl", PATCH, image_size=8 * PATCH, spatial_merge_size=MERGE),
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
