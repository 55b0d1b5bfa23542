"""Molmo: a small copy of the image, then overlapping crops, before the turns of a prompt."""

from __future__ import annotations

from tests.tiny_models import chatml
from tests.tiny_models.checkpoint import Checkpoint, Family, Json
from tests.tiny_models.vocabulary import Vocabulary
from tests.tiny_models.weights import Style

IMAGE = ("<im_start>", "<im_end>", "<im_patch>", "<im_col>")
"""Without a row of the head."""
SPECIALS = (*chatml.SPECIALS, *IMAGE)
CROP_PIXELS = 112
PATCH = 14


def _config(vocabulary: Vocabulary) -> Json:
    text = {
        "model_type": "molmo",
        "d_model": 64,
        "n_heads": 4,
        "n_kv_heads": 2,
        "n_layers": 2,
        "mlp_hidden_size": 256,
        "vocab_size": len(vocabulary) - len(IMAGE),
        "embedding_size": len(vocabulary) - len(IMAGE),
        "additional_vocab_size": len(IMAGE),
    }
    vision = {
        "model_type": "molmo",
        "image_default_input_size": [CROP_PIXELS, CROP_PIXELS],
        "image_patch_size": PATCH,
        "image_pos_patch_size": PATCH,
        "hidden_size": 128,
        "image_emb_dim": 32,
        "image_num_heads": 2,
        "image_num_key_value_heads": 2,
        "image_num_layers": 3,
        "image_head_dim": 16,
        "image_mlp_dim": 64,
        "image_num_pos": (CROP_PIXELS // PATCH) ** 2 + 1,
        "d_model": 64,
        "vit_layers": [-1, -3],
    }
    return {
        "architectures": ["MolmoForCausalLM"],
        "model_type": "molmo",
        "text_config": text,
        "vision_config": vision,
    }


def _describe(vocabulary: Vocabulary) -> Checkpoint:
    return Checkpoint(
        config=_config(vocabulary),
        template="",
        eos=chatml.EOS,
        pad=chatml.PAD,
        files={
            "preprocessor_config.json": {
                "image_processor_type": "MolmoImageProcessor",
                "processor_class": "MolmoProcessor",
                "max_crops": 3,
                "overlap_margins": [2, 2],
                "base_image_input_size": [CROP_PIXELS, CROP_PIXELS],
                "image_token_length_w": 4,
                "image_token_length_h": 4,
                "image_patch_size": PATCH,
            }
        },
        style=Style(embedding="wte.embedding", head="language_model.model.ff_out.weight"),
    )


MOLMO = Family(SPECIALS, _describe)
