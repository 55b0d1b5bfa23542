"""Parts of configurations that several text families share: experts, latents, scales, RoPE."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

EXPERTS: Config = {"num_experts": 4, "num_experts_per_tok": 2}
CHOICE: Config = EXPERTS | {"norm_topk_prob": True}
SHARED_EXPERTS: Config = CHOICE | {
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
LOCAL_EXPERTS: Config = {"num_local_experts": 4, "num_experts_per_tok": 2}
ONE_GROUP: Config = {"n_group": 1, "topk_group": 1}
ROUTED: Config = ONE_GROUP | {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
LATENT: Config = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
INDEXED: Config = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 16}
"""Attention to the keys that an index chooses."""
GRANITE: Config = {
    "logits_scaling": 2.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.5,
    "attention_bias": False,
}
COHERE: Config = {"layer_norm_eps": 1e-5, "logit_scale": 0.5}
MINICPM: Config = {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 12}
STATES: Config = {
    "num_hidden_layers": 3,
    "state_size": 16,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
}
BACKBONE = {"last_norm": "backbone.norm_f.weight", "embedding": "backbone.embeddings.weight"}
"""Names of weights."""
YARN: Config = {
    "rope_type": "yarn",
    "factor": 2.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
}
