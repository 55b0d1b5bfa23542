"""Jina VLM: the whole image, then overlapping crops, whose features are added to their tokens."""

from __future__ import annotations

from tests.tiny_models import chatml
from tests.tiny_models.checkpoint import Checkpoint, Family, Json
from tests.tiny_models.llama import llama
from tests.tiny_models.vocabulary import Vocabulary
from tests.tiny_models.weights import Style

SPECIALS = (*chatml.SPECIALS, "<im_patch>", "<im_start>", "<im_end>", "<im_col>", "<|image|>")
FURTHER = 1
"""Tokens in the second table, `<|image|>` alone."""
PATCH = 14
SIDE = 8 * PATCH


def _config(vocabulary: Vocabulary) -> Json:
    """By mlx-vlm's names: it reads none of those of published checkpoints, whose numbers are its
    defaults."""
    text = llama(
        len(vocabulary) - FURTHER,
        model_type="jina_vlm",
        num_hidden_layers=3,
        additional_vocab_size=FURTHER,
    )
    return {
        "architectures": ["JinaVLMForConditionalGeneration"],
        "model_type": "jvlm",
        "vocab_size": len(vocabulary) - FURTHER,
        "text_config": text,
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "head_dim": 16,
            "patch_size": PATCH,
            "image_size": SIDE,
            "vit_layers": [-1, -2],
            "output_size": 64,
            "connector_hidden_size": 64,
        },
    }


def _describe(vocabulary: Vocabulary) -> Checkpoint:
    return Checkpoint(
        config=_config(vocabulary),
        template=chatml.chatml("<|image|>"),
        eos=chatml.EOS,
        pad=chatml.PAD,
        files={
            "preprocessor_config.json": {
                "base_input_size": [SIDE, SIDE],
                "patch_size": PATCH,
                "max_crops": 4,
                "overlap_margins": [2, 2],
            }
        },
        style=Style(last_norm="ln_f.weight"),
    )


JINA_VLM = Family(SPECIALS, _describe)
