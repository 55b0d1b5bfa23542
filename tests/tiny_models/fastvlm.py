"""FastVLM: one id below 0 for an image, in the place of which its features stand.

The sizes of its vision tower stand in mlx-vlm's code: where this module is imported, they are
smaller.
"""

from __future__ import annotations

from mlx_vlm.models.fastvlm.config import VisionConfig

from tests.tiny_models import chatml
from tests.tiny_models.checkpoint import Checkpoint, Family, Json
from tests.tiny_models.llama import llama
from tests.tiny_models.vocabulary import Vocabulary
from tests.tiny_models.weights import Style

IMAGE_SIDE_PIXELS = 256
SPARE_ROWS = 8

VisionConfig.layers = [1, 1, 1, 1, 1]
VisionConfig.embed_dims = [32, 32, 32, 32, 32]


def _config(vocabulary: Vocabulary) -> Json:
    text = llama(len(vocabulary) + SPARE_ROWS, tie_word_embeddings=True)
    return text | {
        "architectures": ["LlavaQwen2ForCausalLM"],
        "model_type": "llava_qwen2",
        "mm_hidden_size": 64,
        "mm_projector_type": "mlp2x_gelu",
        "tokenizer_model_max_length": 8192,
        "vision_config": {},
    }


def _describe(vocabulary: Vocabulary) -> Checkpoint:
    return Checkpoint(
        config=_config(vocabulary),
        template=chatml.OF_TEXTS,
        eos=chatml.EOS,
        pad=chatml.PAD,
        files={
            "preprocessor_config.json": {
                "image_processor_type": "CLIPImageProcessor",
                "processor_class": "LlavaProcessor",
                "size": {"shortest_edge": IMAGE_SIDE_PIXELS},
                "crop_size": {"height": IMAGE_SIDE_PIXELS, "width": IMAGE_SIDE_PIXELS},
                "image_mean": [0.0] * 3,
                "image_std": [1.0] * 3,
            },
        },
        style=Style(tied_head=True, conv_gain=1.6),
    )


FASTVLM = Family(chatml.SPECIALS, _describe)
