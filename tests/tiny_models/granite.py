"""Granite 4 Vision: features of several layers enter at several layers of the text decoder."""

from __future__ import annotations

from tests.tiny_models import chatml
from tests.tiny_models.checkpoint import MAX_POSITIONS, Checkpoint, Family, Json
from tests.tiny_models.llama import vit
from tests.tiny_models.vocabulary import Vocabulary

SPECIALS = (
    "<|pad|>",
    "<|end_of_text|>",
    "<|start_of_role|>",
    "<|end_of_role|>",
    "<image>",
)
TILE_PIXELS = 32
PATCH = 8
PINPOINTS = [[rows * TILE_PIXELS, columns * TILE_PIXELS] for rows in (1, 2) for columns in (1, 2)]

TEMPLATE = chatml.turns(
    "'<|start_of_role|>' + message.role + '<|end_of_role|>'",
    "<image>",
    "'<|end_of_text|>\\n'",
    "'<|start_of_role|>assistant<|end_of_role|>'",
)


def _config(vocabulary: Vocabulary) -> Json:
    return {
        "architectures": ["Granite4VisionForConditionalGeneration"],
        "model_type": "granite4_vision",
        "vocab_size": len(vocabulary),
        "image_token_index": vocabulary.id("<image>"),
        "image_grid_pinpoints": PINPOINTS,
        "vision_feature_select_strategy": "full",
        "downsample_rate": "2/4",
        "deepstack_layer_map": [[-2, 0], [-1, 2]],
        "use_spatial_sampling": True,
        "spatial_target_layers": [1, 2, 3, 3],
        "text_config": {
            "model_type": "granitemoehybrid",
            "vocab_size": len(vocabulary),
            "hidden_size": 64,
            "intermediate_size": 128,
            "shared_intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "embedding_multiplier": 2.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
            "rope_theta": 10000.0,
            "max_position_embeddings": MAX_POSITIONS,
        },
        "vision_config": vit("siglip_vision_model", PATCH, hidden_size=64, image_size=TILE_PIXELS),
    }


def _describe(vocabulary: Vocabulary) -> Checkpoint:
    return Checkpoint(
        config=_config(vocabulary),
        template=TEMPLATE,
        eos=("<|end_of_text|>",),
        pad="<|pad|>",
        tokens={"image_token": "<image>"},
        files={
            "preprocessor_config.json": {
                "image_processor_type": "LlavaNextImageProcessor",
                "processor_class": "Granite4VisionProcessor",
                "image_grid_pinpoints": PINPOINTS,
                "size": {"height": TILE_PIXELS, "width": TILE_PIXELS},
                "crop_size": {"height": TILE_PIXELS, "width": TILE_PIXELS},
                "do_center_crop": False,
                "image_mean": [0.5] * 3,
                "image_std": [0.5] * 3,
            },
            "processor_config.json": {
                "processor_class": "Granite4VisionProcessor",
                "patch_size": PATCH,
                "vision_feature_select_strategy": "full",
                "image_token": "<image>",
            },
        },
    )


GRANITE4_VISION = Family(SPECIALS, _describe)
