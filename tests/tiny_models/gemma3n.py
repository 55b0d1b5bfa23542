"""Gemma 3n: inputs for each layer, streams that alternate, and layers that share keys and values.

The sizes of its vision tower stand in mlx-vlm's code, and are those of 300 million parameters:
where this module is imported, they are smaller.
"""

from __future__ import annotations

from typing import Any

from mlx_vlm.models.gemma3n import vision

from tests.tiny_models.checkpoint import MAX_POSITIONS, Checkpoint, Family, Json
from tests.tiny_models.gemma import TEMPLATE as GEMMA3_TEMPLATE
from tests.tiny_models.vocabulary import Vocabulary
from tests.tiny_models.weights import Style

SPECIALS = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_image>",
    "<start_of_audio>",
    "<end_of_image>",
    "<image_soft_token>",
    "<end_of_audio>",
    "<audio_soft_token>",
)
"""The last ones are beyond the text's vocabulary, and have embeddings of their own."""
IMAGE_SIDE_PIXELS = 64
SIDE_TOKENS = 4
WINDOW = 64

TEMPLATE = GEMMA3_TEMPLATE.replace("'<start_of_image>' }}", "'<image_soft_token>' }}")


def _blocks() -> list[list[Any]]:
    return [
        [vision._er(3, 16, 2)],
        [vision._uir(3, 5, 32, 2, 2.0)],
        [vision._uir(5, 5, 32, 2, 2.0), vision._mmqa(2, 8, 2)],
        [vision._uir(5, 5, 32, 2, 2.0), vision._mmqa(2, 8, 1), vision._uir(0, 0, 32, 1, 2.0)],
    ]


class _SmallAdapter(vision.MobileNetV5MultiScaleFusionAdapter):  # type: ignore[misc]
    def __init__(self, **_: Any) -> None:
        super().__init__(in_chs=[64], out_chs=32, output_resolution=SIDE_TOKENS)


vision.gemma3n_mobilenet_def = _blocks
vision.MobileNetV5MultiScaleFusionAdapter = _SmallAdapter


def _config(vocabulary: Vocabulary) -> Json:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    return {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "vocab_size": len(vocabulary),
        "hidden_size": 64,
        "image_token_id": vocabulary.id("<image_soft_token>"),
        "image_token_index": vocabulary.id("<image_soft_token>"),
        "audio_token_id": vocabulary.id("<audio_soft_token>"),
        "vision_soft_tokens_per_image": SIDE_TOKENS**2,
        "text_config": {
            "model_type": "gemma3n_text",
            "vocab_size": len(vocabulary),
            "vocab_size_per_layer_input": vocabulary.id("<end_of_image>"),
            "hidden_size": 64,
            "hidden_size_per_layer_input": 32,
            "intermediate_size": [128] * len(kinds),
            "num_hidden_layers": len(kinds),
            "num_kv_shared_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "laurel_rank": 32,
            "altup_num_inputs": 3,
            "activation_sparsity_pattern": [0.5] * 2 + [0.0] * 4,
            "sliding_window": WINDOW,
            "layer_types": kinds,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": MAX_POSITIONS,
        },
        "vision_config": {
            "model_type": "gemma3n_vision",
            "hidden_size": 32,
            "vocab_size": 4,
            "vocab_offset": vocabulary.id("<end_of_image>"),
        },
        "audio_config": {
            "hidden_size": 32,
            "input_feat_size": 16,
            "conf_num_attention_heads": 2,
            "conf_num_hidden_layers": 1,
            "sscp_conv_channel_size": [8, 8],
            "vocab_size": 4,
            "vocab_offset": vocabulary.id("<audio_soft_token>"),
        },
    }


def _describe(vocabulary: Vocabulary) -> Checkpoint:
    return Checkpoint(
        config=_config(vocabulary),
        template=TEMPLATE,
        eos=("<end_of_turn>", "<eos>"),
        pad="<pad>",
        tokens={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
            "boa_token": "<start_of_audio>",
            "eoa_token": "<end_of_audio>",
            "audio_token": "<audio_soft_token>",
        },
        files={
            "preprocessor_config.json": {
                "image_processor_type": "SiglipImageProcessor",
                "processor_class": "Gemma3nProcessor",
                "size": {"height": IMAGE_SIDE_PIXELS, "width": IMAGE_SIDE_PIXELS},
                "do_normalize": False,
            },
            "processor_config.json": {
                "processor_class": "Gemma3nProcessor",
                "image_seq_length": SIDE_TOKENS**2,
            },
        },
        style=Style(tied_head=True, tied_scale=1.0),
    )


GEMMA3N = Family(SPECIALS, _describe, bos="<bos>")
