"""dots.ocr: rows of patches with a grid per image, and a plain text decoder."""

from __future__ import annotations

from tests.tiny_models import chatml
from tests.tiny_models.checkpoint import Checkpoint, Family, Json
from tests.tiny_models.llama import llama
from tests.tiny_models.vocabulary import Vocabulary

SPECIALS = (
    "[PAD]",
    "<|endoftext|>",
    "<|user|>",
    "<|endofuser|>",
    "<|assistant|>",
    "<|endofassistant|>",
    "<|system|>",
    "<|endofsystem|>",
    "<|img|>",
    "<|imgpad|>",
    "<|endofimg|>",
    "<|video_pad|>",
)
PATCH = 14
MERGE = 2

TEMPLATE = chatml.turns(
    "'<|' + message.role + '|>'",
    "<|img|><|imgpad|><|endofimg|>",
    "'<|endof' + message.role + '|>'",
    "'<|assistant|>'",
)


def _config(vocabulary: Vocabulary) -> Json:
    return llama(len(vocabulary), model_type="dots_ocr", attention_bias=True) | {
        "architectures": ["DotsOCRForCausalLM"],
        "image_token_id": vocabulary.id("<|imgpad|>"),
        "video_token_id": vocabulary.id("<|video_pad|>"),
        "vision_config": {
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
    }


def _describe(vocabulary: Vocabulary) -> Checkpoint:
    return Checkpoint(
        config=_config(vocabulary),
        template=TEMPLATE,
        eos=("<|endofassistant|>", "<|endoftext|>"),
        pad="[PAD]",
        tokens={"image_token": "<|imgpad|>", "video_token": "<|video_pad|>"},
        files={
            "preprocessor_config.json": {
                "image_processor_type": "Qwen2VLImageProcessor",
                "processor_class": "DotsVLProcessor",
                "patch_size": PATCH,
                "temporal_patch_size": 1,
                "merge_size": MERGE,
                "min_pixels": 4 * (PATCH * MERGE) ** 2,
                "max_pixels": 256 * (PATCH * MERGE) ** 2,
            }
        },
    )


DOTS_OCR = Family(SPECIALS, _describe)
