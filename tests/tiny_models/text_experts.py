"""Text models with experts; some keep a latent in place of keys and values."""

from __future__ import annotations

from typing import Any

from tests.tiny_models.checkpoint import Family
from tests.tiny_models.text import text_family, tied, windows

CHOICE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}

EXPERTS: dict[str, Family] = {
    "qwen2_moe": text_family(
        "Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        **CHOICE,
    ),
    "qwen3_moe": text_family(
        "Qwen3MoeForCausalLM",
        tied(),
        model_type="qwen3_moe",
        moe_intermediate_size=64,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        **CHOICE,
    ),
    "gpt_oss": text_family(
        "GptOssForCausalLM",
        model_type="gpt_oss",
        intermediate_size=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 2.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
        },
        **windows(4),
    ),
    "granitemoe": text_family(
        "GraniteMoeForCausalLM",
        tied(),
        model_type="granitemoe",
        logits_scaling=2.0,
        attention_multiplier=0.25,
        embedding_multiplier=6.0,
        residual_multiplier=0.5,
        attention_bias=False,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "glm4_moe": text_family(
        "Glm4MoeForCausalLM",
        model_type="glm4_moe",
        rope_scaling=None,
        use_qk_norm=True,
        attention_bias=True,
        partial_rotary_factor=0.5,
        **ROUTED,
    ),
    "glm4_moe_lite": text_family(
        "Glm4MoeLiteForCausalLM", model_type="glm4_moe_lite", **ROUTED | LATENT
    ),
    "minimax": text_family(
        "MiniMaxM2ForCausalLM",
        model_type="minimax_m2",
        intermediate_size=64,
        shared_intermediate_size=0,
        num_local_experts=4,
        num_experts_per_tok=2,
        rotary_dim=8,
    ),
    "deepseek_v3": text_family(
        "DeepseekV3ForCausalLM", model_type="deepseek_v3", num_hidden_layers=3, **ROUTED | LATENT
    ),
    "deepseek_v2": text_family(
        "DeepseekV2ForCausalLM",
        model_type="deepseek_v2",
        num_hidden_layers=3,
        rope_scaling={
            "type": "yarn",
            "factor": 2.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
        **ROUTED | LATENT,
    ),
    "mixtral": text_family(
        "MixtralForCausalLM",
        model_type="mixtral",
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "bailing_moe": text_family(
        "BailingMoeForCausalLM",
        model_type="bailing_moe",
        num_shared_experts=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        **CHOICE,
    ),
    "dots1": text_family("Dots1ForCausalLM", model_type="dots1", **ROUTED),
}
