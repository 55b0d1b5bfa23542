"""Text models whose states are computed token by token, padding included."""

from __future__ import annotations

from tests.tiny_models.checkpoint import Family
from tests.tiny_models.text import WINDOW, named, text_family, tied
from tests.tiny_models.text_parts import BACKBONE, CHOICE, EXPERTS, ONE_GROUP, STATES
from tests.tiny_models.weights import Style

SCANS: dict[str, Family] = named(
    jamba=text_family(
        "JambaForCausalLM",
        tied(last_norm="final_layernorm.weight"),
        attn_layer_offset=1,
        attn_layer_period=2,
        expert_layer_offset=1,
        expert_layer_period=2,
        mamba_d_conv=4,
        mamba_d_state=16,
        mamba_expand=2,
        mamba_dt_rank=4,
        **EXPERTS,
    ),
    mamba=text_family(
        "MambaForCausalLM", tied(**BACKBONE), intermediate_size=128, time_step_rank=4, **STATES
    ),
    falcon_mamba=text_family(
        "FalconMambaForCausalLM",
        Style(),
        intermediate_size=128,
        time_step_rank=4,
        mixer_rms_eps=1e-6,
        **STATES,
    ),
    rwkv7=text_family(
        "RWKV7ForCausalLM",
        norm_eps=1e-5,
        head_dim=32,
        num_hidden_layers=3,
        a_low_rank_dim=16,
        v_low_rank_dim=16,
        gate_low_rank_dim=16,
        decay_low_rank_dim=16,
    ),
    recurrent_gemma=text_family(
        "RecurrentGemmaForCausalLM",
        tied(norm_offset=1.0, last_norm="final_norm.weight", saved_prefix="language_model."),
        attention_bias=False,
        conv1d_width=4,
        logits_soft_cap=30.0,
        attention_window_size=WINDOW,
        num_key_value_heads=1,
        block_types=["recurrent", "recurrent", "attention"],
        num_hidden_layers=4,
    ),
    bailing_moe_linear=text_family(
        "BailingMoeLinearV2ForCausalLM",
        moe_intermediate_size=32,
        num_shared_experts=1,
        first_k_dense_replace=1,
        layer_group_size=2,
        group_norm_size=2,
        use_qk_norm=True,
        score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        routed_scaling_factor=2.5,
        partial_rotary_factor=0.5,
        **ONE_GROUP | CHOICE,
    ),
)
