"""Nemotron Nano Omni: images at their own shape, over layers of Mamba 2, attention and experts."""

from __future__ import annotations

from tests.tiny_models import chatml
from tests.tiny_models.checkpoint import Checkpoint, Family
from tests.tiny_models.text_recurrent import RECURRENT
from tests.tiny_models.vocabulary import Vocabulary

SPECIALS = (*chatml.SPECIALS, "<image>", "<img>", "</img>")
PATCH = 16


def _describe(vocabulary: Vocabulary) -> Checkpoint:
    text = RECURRENT["nemotron_h"].describe(vocabulary)
    config = {
        "architectures": ["NemotronH_Nano_Omni_Reasoning_V3"],
        "model_type": "NemotronH_Nano_Omni_Reasoning_V3",
        "vocab_size": len(vocabulary),
        "img_context_token_id": vocabulary.id("<image>"),
        "vit_hidden_size": 32,
        "projector_hidden_size": 64,
        "ps_version": "v2",
        "llm_config": text.config,
        "vision_config": {
            "model_type": "radio",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "image_size": 64,
            "max_resolution": 128,
            "patch_size": PATCH,
        },
    }
    settings = {
        "norm_mean": [0.5] * 3,
        "norm_std": [0.5] * 3,
        "patch_size": PATCH,
        "downsample_ratio": 0.5,
        "min_num_patches": 16,
        "max_num_patches": 256,
        "max_model_len": 8192,
    }
    return Checkpoint(
        config=config,
        template=chatml.chatml("<image>"),
        eos=chatml.EOS,
        pad=chatml.PAD,
        files={"preprocessor_config.json": settings},
        style=text.style,
    )


NEMOTRON_OMNI = Family(SPECIALS, _describe)
