"""The plain text decoder and the plain vision tower that several families have."""

from __future__ import annotations

from typing import Any

from tests.tiny_models.checkpoint import MAX_POSITIONS, Json


def llama(vocab_size: int, **further: Any) -> Json:
    """A `text_config` of hidden size 64, with what a family adds or changes."""
    return {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
    } | further


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
