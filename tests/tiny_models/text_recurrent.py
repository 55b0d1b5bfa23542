"""Text models some or all of whose layers carry a state of fixed size."""

from __future__ import annotations

from typing import Any

from tests.tiny_models.checkpoint import Family
from tests.tiny_models.text import named, text_family, tied
from tests.tiny_models.text_parts import (
    BACKBONE,
    CHOICE,
    GRANITE,
    LOCAL_EXPERTS,
    ONE_GROUP,
    SHARED_EXPERTS,
    STATES,
)
from tests.tiny_models.weights import Style

DELTA: dict[str, Any] = {
    "head_dim": 32,
    "attention_bias": False,
    "full_attention_interval": 2,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
}
ROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000000.0,
    "partial_rotary_factor": 0.5,
    "mrope_interleaved": True,
    "mrope_section": [4, 2, 2],
}
CONVOLUTIONS: dict[str, Any] = {
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
}
LFM2_STYLE = tied(last_norm="model.embedding_norm.weight")

RECURRENT: dict[str, Family] = named(
    qwen3_next=text_family(
        "Qwen3NextForCausalLM",
        decoder_sparse_step=1,
        mlp_only_layers=[],
        partial_rotary_factor=0.5,
        **DELTA | SHARED_EXPERTS,
    ),
    qwen3_5_text=text_family("Qwen3_5ForCausalLM", rope_parameters=ROPE, **DELTA),
    qwen3_5_moe_text=text_family(
        "Qwen3_5MoeForCausalLM", rope_parameters=ROPE, **DELTA | SHARED_EXPERTS
    ),
    lfm2=text_family(
        "Lfm2ForCausalLM",
        LFM2_STYLE,
        block_dim=64,
        block_ff_dim=128,
        block_multiple_of=32,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
        **CONVOLUTIONS,
    ),
    lfm2_moe=text_family(
        "Lfm2MoeForCausalLM",
        LFM2_STYLE,
        moe_intermediate_size=32,
        use_expert_bias=True,
        num_dense_layers=1,
        **CHOICE | CONVOLUTIONS,
    ),
    granitemoehybrid=text_family(
        "GraniteMoeHybridForCausalLM",
        tied(),
        layer_types=["mamba", "attention", "mamba", "attention"],
        shared_intermediate_size=64,
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_proj_bias=False,
        mamba_d_state=32,
        mamba_d_conv=4,
        mamba_n_groups=1,
        mamba_conv_bias=True,
        position_embedding_type="nope",
        **LOCAL_EXPERTS | GRANITE,
    ),
    kimi_linear=text_family(
        "KimiLinearForCausalLM",
        linear_attn_config={
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
            "num_heads": 2,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
        model_max_length=8192,
        num_key_value_heads=4,
        num_experts=4,
        num_experts_per_token=2,
        num_shared_experts=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        mla_use_nope=True,
    ),
    nemotron_h=text_family(
        "NemotronHForCausalLM",
        Style(**BACKBONE),
        hybrid_override_pattern="M*-ME",
        num_hidden_layers=5,
        attention_bias=False,
        mamba_num_heads=4,
        mamba_head_dim=32,
        mamba_proj_bias=False,
        ssm_state_size=32,
        conv_kernel=4,
        n_groups=2,
        mlp_bias=False,
        layer_norm_epsilon=1e-5,
        use_bias=False,
        use_conv_bias=True,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
        **ONE_GROUP,
    ),
    mamba2=text_family(
        "Mamba2ForCausalLM",
        tied(**BACKBONE),
        num_heads=4,
        head_dim=32,
        layer_norm_epsilon=1e-5,
        n_groups=1,
        time_step_limit=[0.0, 100.0],
        time_step_rank="auto",
        **STATES | {"state_size": 32},
    ),
    falcon_h1=text_family(
        "FalconH1ForCausalLM",
        Style(last_norm="model.final_layernorm.weight"),
        num_hidden_layers=3,
        mamba_d_ssm=64,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=32,
        mamba_n_groups=1,
        mamba_d_conv=4,
        mamba_rms_norm=True,
    ),
    plamo2=text_family(
        "Plamo2ForCausalLM",
        hidden_size_per_head=16,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_num_heads=4,
        mamba_step=2,
        full_attention_idx=[],
    ),
)
