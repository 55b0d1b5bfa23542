"""PaliGemma: square images of one size before the text; all tokens of a prompt see each other."""

from __future__ import annotations

from tests.tiny_models.checkpoint import MAX_POSITIONS, Checkpoint, Family, Json
from tests.tiny_models.vocabulary import Vocabulary
from tests.tiny_models.weights import Style

EXTRA = (*(f"<loc{i:04}>" for i in range(1024)), *(f"<seg{i:03}>" for i in range(128)))
"""mlx-vlm's processor adds them where they are missing."""
SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>", "<image>", *EXTRA)
SIDE_PIXELS = 56
PATCH = 14
TOKENS_PER_IMAGE = (SIDE_PIXELS // PATCH) ** 2


def _config(vocabulary: Vocabulary) -> Json:
    return {
        "architectures": ["PaliGemmaForConditionalGeneration"],
        "model_type": "paligemma",
        "bos_token_id": vocabulary.id("<bos>"),
        "hidden_size": 64,
        "image_token_index": vocabulary.id("<image>"),
        "projection_dim": 64,
        "text_config": {
            "model_type": "gemma2",
            "vocab_size": len(vocabulary),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 60.0,
            "num_image_tokens": TOKENS_PER_IMAGE,
            "max_position_embeddings": MAX_POSITIONS,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIDE_PIXELS,
            "patch_size": PATCH,
            "projection_dim": 64,
            "num_image_tokens": TOKENS_PER_IMAGE,
        },
    }


def _describe(vocabulary: Vocabulary) -> Checkpoint:
    return Checkpoint(
        config=_config(vocabulary),
        template="",
        eos=("<eos>",),
        pad="<pad>",
        tokens={"image_token": "<image>"},
        files={
            "preprocessor_config.json": {
                "image_processor_type": "SiglipImageProcessor",
                "processor_class": "PaliGemmaProcessor",
                "image_seq_length": TOKENS_PER_IMAGE,
                "size": {"height": SIDE_PIXELS, "width": SIDE_PIXELS},
                "image_mean": [0.5] * 3,
                "image_std": [0.5] * 3,
            }
        },
        style=Style(tied_head=True, norm_offset=1.0),
    )


PALIGEMMA = Family(SPECIALS, _describe, bos="<bos>")
