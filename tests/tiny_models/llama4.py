"""Llama 4: tiles and a small copy of the image; blocks of attention, layers without positions."""

from __future__ import annotations

from tests.tiny_models import chatml
from tests.tiny_models.checkpoint import Checkpoint, Family, Json
from tests.tiny_models.llama import llama
from tests.tiny_models.vocabulary import Vocabulary

SPECIALS = (
    *chatml.SPECIALS,
    "<|image|>",
    "<|image_start|>",
    "<|image_end|>",
    "<|patch|>",
    "<|tile_x_separator|>",
    "<|tile_y_separator|>",
)
TILE_PIXELS = 56
BLOCK = 24


def _config(vocabulary: Vocabulary) -> Json:
    text = llama(
        len(vocabulary),
        model_type="llama4_text",
        num_hidden_layers=5,
        intermediate_size=32,
        intermediate_size_mlp=128,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        use_qk_norm=True,
        attention_chunk_size=BLOCK,
        attn_temperature_tuning=True,
        attn_scale=0.5,
        floor_scale=16,
    )
    vision = {
        "model_type": "llama4_vision_model",
        "hidden_size": 32,
        "image_size": TILE_PIXELS,
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
    }
    return {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "image_token_index": vocabulary.id("<|patch|>"),
        "text_config": text,
        "vision_config": vision,
    }


def _describe(vocabulary: Vocabulary) -> Checkpoint:
    return Checkpoint(
        config=_config(vocabulary),
        template=chatml.chatml("<|image|>"),
        eos=chatml.EOS,
        pad=chatml.PAD,
        files={
            "preprocessor_config.json": {
                "image_processor_type": "Llama4ImageProcessorFast",
                "processor_class": "Llama4Processor",
                "size": {"height": TILE_PIXELS, "width": TILE_PIXELS},
                "max_patches": 4,
                "image_mean": [0.5] * 3,
                "image_std": [0.5] * 3,
            }
        },
    )


LLAMA4 = Family(SPECIALS, _describe)
