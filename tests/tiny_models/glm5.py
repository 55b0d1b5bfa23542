"""GLM-5 Next: linear attention, attention to the keys that an index chooses, and experts."""

from __future__ import annotations

from tests.tiny_models import chatml
from tests.tiny_models.checkpoint import MAX_POSITIONS, Checkpoint, Family, Json
from tests.tiny_models.text_parts import INDEXED, LATENT, ROUTED
from tests.tiny_models.vocabulary import Vocabulary

SPECIALS = (
    *chatml.SPECIALS,
    "<|image|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
)
PATCH = 14


def _config(vocabulary: Vocabulary) -> Json:
    text = (
        ROUTED
        | LATENT
        | INDEXED
        | {
            "model_type": "glm5_next_text",
            "vocab_size": len(vocabulary),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "qk_rope_head_dim": 0,
            "index_kpool": 4,
            "linear_attn_config": {"head_dim": 32, "num_heads": 2, "short_conv_kernel_size": 4},
            "layer_types": ["linear_attention", *["deepseek_sparse_attention"] * 2],
            "indexer_types": ["full", "full", "shared"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "hc_mult": 2,
            "hc_sinkhorn_iters": 2,
            "max_position_embeddings": MAX_POSITIONS,
        }
    )
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "image_token_id": vocabulary.id("<|image|>"),
        "image_start_token_id": vocabulary.id("<|begin_of_image|>"),
        "image_end_token_id": vocabulary.id("<|end_of_image|>"),
        "video_start_token_id": vocabulary.id("<|begin_of_video|>"),
        "video_end_token_id": vocabulary.id("<|end_of_video|>"),
        "text_config": text,
        "vision_config": {
            "model_type": "glm5_next_vision",
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 2,
            "image_size": 112,
            "patch_size": PATCH,
            "intermediate_size": 64,
            "out_hidden_size": 64,
            "projection_intermediate_size": 64,
        },
    }


def _describe(vocabulary: Vocabulary) -> Checkpoint:
    settings = {"patch_size": PATCH, "min_image_tokens": 4, "max_image_tokens": 64}
    return Checkpoint(
        config=_config(vocabulary),
        template=chatml.chatml("<|begin_of_image|><|image|><|end_of_image|>"),
        eos=chatml.EOS,
        pad=chatml.PAD,
        files={"processor_config.json": {"image_processor": settings}},
    )


GLM5_NEXT = Family(SPECIALS, _describe)
