"""LFM2-VL: short convolutions among the attention layers; a large image becomes tiles."""

from __future__ import annotations

from tests.tiny_models import chatml
from tests.tiny_models.checkpoint import MAX_POSITIONS, Checkpoint, Family, Json
from tests.tiny_models.llama import vit
from tests.tiny_models.vocabulary import Vocabulary
from tests.tiny_models.weights import Style

MAX_TILES = 10
_TILES = tuple(
    f"<|img_row_{row}_col_{column}|>"
    for row in range(1, MAX_TILES + 1)
    for column in range(1, MAX_TILES + 1)
    if row * column <= MAX_TILES
)
SPECIALS = (
    "<|pad|>",
    "<|startoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<image>",
    "<|image_start|>",
    "<|image_end|>",
    "<|img_thumbnail|>",
    *_TILES,
)
PATCH = 8
TILE_PIXELS = 32

TEMPLATE = chatml.chatml("<image>", before="bos_token")


def _config(vocabulary: Vocabulary) -> Json:
    return {
        "architectures": ["Lfm2VlForConditionalGeneration"],
        "model_type": "lfm2_vl",
        "image_token_id": vocabulary.id("<image>"),
        "downsample_factor": 2,
        "projector_hidden_size": 64,
        "text_config": {
            "model_type": "lfm2",
            "vocab_size": len(vocabulary),
            "hidden_size": 64,
            "intermediate_size": 128,
            "block_dim": 64,
            "block_ff_dim": 128,
            "block_auto_adjust_ff_dim": False,
            "conv_dim": 64,
            "conv_dim_out": 64,
            "conv_L_cache": 3,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "max_position_embeddings": MAX_POSITIONS,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        },
        "vision_config": vit("siglip2_vision_model", PATCH, num_patches=16),
    }


def _describe(vocabulary: Vocabulary) -> Checkpoint:
    return Checkpoint(
        config=_config(vocabulary),
        template=TEMPLATE,
        eos=("<|im_end|>",),
        pad="<|pad|>",
        tokens={
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail_token": "<|img_thumbnail|>",
        },
        files={
            "preprocessor_config.json": {
                "image_processor_type": "Lfm2VlImageProcessorFast",
                "processor_class": "Lfm2VlProcessor",
                "encoder_patch_size": PATCH,
                "tile_size": TILE_PIXELS,
                "min_image_tokens": 4,
                "max_image_tokens": 8,
            },
        },
        style=Style(tied_head=True, last_norm="model.embedding_norm.weight"),
    )


LFM2_VL = Family(SPECIALS, _describe, bos="<|startoftext|>")
