"""Text models with experts; some keep a latent in place of keys and values."""

from __future__ import annotations

from tests.tiny_models.checkpoint import Family
from tests.tiny_models.text import named, text_family, tied, windows
from tests.tiny_models.text_parts import CHOICE, GRANITE, LATENT, LOCAL_EXPERTS, ROUTED, YARN

WITH_EXPERTS: dict[str, Family] = named(
    qwen2_moe=text_family(
        "Qwen2MoeForCausalLM",
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        **CHOICE,
    ),
    qwen3_moe=text_family(
        "Qwen3MoeForCausalLM",
        tied(),
        moe_intermediate_size=64,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        **CHOICE,
    ),
    gpt_oss=text_family(
        "GptOssForCausalLM", rope_scaling=YARN, intermediate_size=64, **LOCAL_EXPERTS | windows(4)
    ),
    granitemoe=text_family("GraniteMoeForCausalLM", tied(), **LOCAL_EXPERTS | GRANITE),
    glm4_moe=text_family(
        "Glm4MoeForCausalLM",
        rope_scaling=None,
        use_qk_norm=True,
        attention_bias=True,
        partial_rotary_factor=0.5,
        **ROUTED,
    ),
    glm4_moe_lite=text_family("Glm4MoeLiteForCausalLM", **ROUTED | LATENT),
    minimax=text_family(
        "MiniMaxM2ForCausalLM",
        model_type="minimax_m2",
        intermediate_size=64,
        shared_intermediate_size=0,
        rotary_dim=8,
        **LOCAL_EXPERTS,
    ),
    deepseek_v3=text_family("DeepseekV3ForCausalLM", num_hidden_layers=3, **ROUTED | LATENT),
    deepseek_v2=text_family(
        "DeepseekV2ForCausalLM",
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
    mixtral=text_family("MixtralForCausalLM", **LOCAL_EXPERTS),
    bailing_moe=text_family(
        "BailingMoeForCausalLM",
        num_shared_experts=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        **CHOICE,
    ),
    dots1=text_family("Dots1ForCausalLM", **ROUTED),
    deepseek=text_family("DeepseekForCausalLM", moe_layer_freq=1, num_key_value_heads=4, **ROUTED),
    ernie4_5_moe=text_family(
        "Ernie4_5_MoeForCausalLM",
        tied(),
        use_bias=False,
        moe_num_experts=4,
        moe_layer_start_index=1,
        moe_intermediate_size=32,
        moe_k=2,
        moe_layer_interval=1,
        moe_num_shared_experts=1,
    ),
    olmoe=text_family(
        "OlmoeForCausalLM", intermediate_size=64, **CHOICE | {"norm_topk_prob": False}
    ),
    phimoe=text_family(
        "PhiMoEForCausalLM",
        intermediate_size=64,
        original_max_position_embeddings=4096,
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0 + n / 8 for n in range(8)],
            "long_factor": [1.0 + n for n in range(8)],
            "short_mscale": 1.24,
            "long_mscale": 1.24,
            "original_max_position_embeddings": 4096,
        },
        **LOCAL_EXPERTS,
    ),
    hunyuan=text_family(
        "HunYuanMoEV1ForCausalLM",
        tied(),
        attention_bias=False,
        moe_topk=2,
        num_experts=4,
        num_shared_expert=1,
        use_mixed_mlp_moe=True,
        use_qk_norm=True,
        use_cla=True,
        cla_share_factor=2,
        rope_scaling={"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
    ),
    klear=text_family(
        "KlearMoeForCausalLM",
        attention_bias=False,
        mlp_only_layers=[],
        decoder_sparse_step=1,
        n_shared_experts=1,
        moe_intermediate_size=32,
        **CHOICE,
    ),
    dbrx=text_family(
        "DbrxForCausalLM",
        positions="max_seq_len",
        d_model=64,
        n_layers=3,
        n_heads=4,
        ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 500000},
    ),
    solar_open=text_family("SolarOpenForCausalLM", partial_rotary_factor=1.0, **ROUTED),
    xing4_0=text_family("XingForCausalLM", num_hidden_layers=3, hc_mult=2, **ROUTED | LATENT),
)
