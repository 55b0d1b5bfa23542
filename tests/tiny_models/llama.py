"""The plain text decoder and the plain vision tower that several families have."""

from __future__ import annotations

from typing import Any

from tests.tiny_models.checkpoint import MAX_POSITIONS, Json

SIZES: Json = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
}


def decoder(model_type: str, **further: Any) -> Json:
    """A `text_config` of hidden size 64, with what a family adds or changes."""
    return {"model_type": model_type} | SIZES | further


def llama(model_type: str = "llama", **further: Any) -> Json:
    """`decoder` with heads, norms and positions as Llama has them."""
    heads = {"head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 100000.0}
    return decoder(model_type) | heads | {"tie_word_embeddings": False} | further


def vit(model_type: str, patch_size: Any, **further: Any) -> Json:
    """A `vision_config` of hidden size 32, with what a family adds or changes."""
    return {
        "model_type": model_type,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_channels": 3,
        "patch_size": patch_size,
    } | further
