"""MiniCPM-o: one size of image for any shape, resampled to a fixed number of tokens."""

from __future__ import annotations

from tests.tiny_models import chatml
from tests.tiny_models.checkpoint import Checkpoint, Family, Json
from tests.tiny_models.llama import llama
from tests.tiny_models.vocabulary import Vocabulary

SPECIALS = (*chatml.SPECIALS, "<unk>", "<image>", "</image>", "<slice>", "</slice>")
TOKENS_PER_IMAGE = 8
PATCH = 14

TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


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
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 8 * PATCH,
            "patch_size": PATCH,
        },
    }


def _describe(vocabulary: Vocabulary) -> Checkpoint:
    return Checkpoint(
        config=_config(vocabulary),
        template=TEMPLATE,
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
