"""Molmo 2: a small copy of the image, then overlapping crops; image tokens beyond the head."""

from __future__ import annotations

from tests.tiny_models import chatml
from tests.tiny_models.checkpoint import MAX_POSITIONS, Checkpoint, Family, Json
from tests.tiny_models.vocabulary import Vocabulary
from tests.tiny_models.weights import Style

IMAGE = (
    "<im_start>",
    "<im_end>",
    "<im_patch>",
    "<im_col>",
    "<low_res_im_start>",
    "<|image|>",
    "<im_low>",
    "<frame_start>",
    "<frame_end>",
)
"""Without a row of the head."""
SPECIALS = (*chatml.SPECIALS, *IMAGE)
CROP_PIXELS = 56
PATCH = 14
VISION = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
}


def _config(vocabulary: Vocabulary) -> Json:
    text = {
        "model_type": "molmo2_text",
        "vocab_size": len(vocabulary) - len(IMAGE),
        "additional_vocab_size": len(IMAGE),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "layer_norm_eps": 1e-6,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": 1000000.0,
        "use_qk_norm": True,
        "qk_norm_type": "qwen3",
    }
    vit = VISION | {
        "model_type": "molmo2",
        "num_hidden_layers": 3,
        "image_patch_size": PATCH,
        "image_num_pos": (CROP_PIXELS // PATCH) ** 2,
        "image_default_input_size": [CROP_PIXELS, CROP_PIXELS],
    }
    return {
        "architectures": ["Molmo2ForConditionalGeneration"],
        "model_type": "molmo2",
        "image_start_token_id": vocabulary.id("<im_start>"),
        "low_res_image_start_token_id": vocabulary.id("<low_res_im_start>"),
        "image_end_token_id": vocabulary.id("<im_end>"),
        "image_low_res_id": vocabulary.id("<im_low>"),
        "image_patch_id": vocabulary.id("<im_patch>"),
        "image_col_id": vocabulary.id("<im_col>"),
        "frame_start_token_id": vocabulary.id("<frame_start>"),
        "frame_end_token_id": vocabulary.id("<frame_end>"),
        "text_config": text,
        "vit_config": vit,
        "adapter_config": VISION | {"text_hidden_size": 64, "vit_layers": [-1, -3]},
    }


def _describe(vocabulary: Vocabulary) -> Checkpoint:
    return Checkpoint(
        config=_config(vocabulary),
        template=chatml.chatml("<|image|>"),
        eos=chatml.EOS,
        pad=chatml.PAD,
        files={
            "preprocessor_config.json": {
                "image_processor_type": "Molmo2ImageProcessor",
                "processor_class": "Molmo2Processor",
                "size": {"height": CROP_PIXELS, "width": CROP_PIXELS},
                "max_crops": 3,
                "overlap_margins": [1, 1],
                "patch_size": PATCH,
                "pooling_size": [2, 2],
                "image_mean": [0.5] * 3,
                "image_std": [0.5] * 3,
            }
        },
        style=Style(embedding="wte.embedding"),
    )


MOLMO2 = Family(SPECIALS, _describe)
