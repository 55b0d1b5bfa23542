"""MiniCPM-o: one size of image for any shape, resampled to a fixed number of tokens."""

from __future__ import annotations

from tests.tiny_models import chatml
from tests.tiny_models.checkpoint import Checkpoint, Family, Json
from tests.tiny_models.llama import llama, vit
from tests.tiny_models.vocabulary import Vocabulary

SPECIALS = (*chatml.SPECIALS, "<unk>", "<image>", "</image>", "<slice>", "</slice>")
TOKENS_PER_IMAGE = 8
PATCH = 14


def _config(vocabulary: Vocabulary) -> Json:
    text = llama(
        len(vocabulary),
        model_type="minicpmo",
        hidden_size=128,
        num_hidden_layers=3,
        rope_scaling={"rope_type": "default", "mrope_section": [4, 2, 2]},
    )
    return text | {
        "architectures": ["MiniCPMO"],
        "query_num": TOKENS_PER_IMAGE,
        "image_size": 4 * PATCH,
        "patch_size": PATCH,
        "init_audio": False,
        "init_tts": False,
        "slice_mode": False,
        "vision_config": vit("siglip_vision_model", PATCH, image_size=8 * PATCH),
    }


def _describe(vocabulary: Vocabulary) -> Checkpoint:
    return Checkpoint(
        config=_config(vocabulary),
        template=chatml.OF_TEXTS,
        eos=chatml.EOS,
        pad=chatml.PAD,
        files={
            "preprocessor_config.json": {
                "image_processor_type": "MiniCPMVImageProcessor",
                "processor_class": "MiniCPMOProcessor",
                "image_feature_size": TOKENS_PER_IMAGE,
                "patch_size": PATCH,
                "scale_resolution": 4 * PATCH,
                "norm_mean": [0.5] * 3,
                "norm_std": [0.5] * 3,
            }
        },
    )


MINICPMO = Family(SPECIALS, _describe)
