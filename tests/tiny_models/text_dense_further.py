"""Further text models of attention and dense layers."""

from __future__ import annotations

from tests.tiny_models.checkpoint import Family
from tests.tiny_models.text import text_family, tied
from tests.tiny_models.text_experts import LATENT
from tests.tiny_models.weights import Style

DENSE_FURTHER: dict[str, Family] = {
    "glm": text_family("GlmForCausalLM", model_type="glm", attention_bias=True),
    "helium": text_family(
        "HeliumForCausalLM", model_type="helium", attention_bias=False, mlp_bias=False
    ),
    "mimo": text_family(
        "MiMoForCausalLM", model_type="mimo", attention_bias=True, num_nextn_predict_layers=1
    ),
    "minicpm": text_family(
        "MiniCPMForCausalLM",
        Style(saved_prefix="language_model."),
        model_type="minicpm",
        dim_model_base=32,
        scale_depth=1.4,
        scale_emb=12,
    ),
    "minicpm3": text_family(
        "MiniCPM3ForCausalLM",
        model_type="minicpm3",
        dim_model_base=32,
        scale_depth=1.4,
        scale_emb=12,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 1.5, 2.0, 3.0],
            "original_max_position_embeddings": 4096,
        },
    ),
    "nemotron": text_family(
        "NemotronForCausalLM",
        Style(norm_offset=1.0),
        model_type="nemotron",
        hidden_act="relu2",
        norm_eps=1e-5,
        partial_rotary_factor=0.5,
    ),
    "telechat3": text_family("TeleChat3ForCausalLM", model_type="telechat3", rope_scaling=None),
    "youtu_llm": text_family("YoutuForCausalLM", model_type="youtu_llm", **LATENT),
    "llama4_text": text_family(
        "Llama4ForCausalLM",
        tied(tied_scale=0.1),
        model_type="llama4_text",
        intermediate_size_mlp=128,
        no_rope_layers=[1, 1, 1, 0],
        use_qk_norm=True,
    ),
    "k2_horizon": text_family(
        "K2HorizonForCausalLM",
        model_type="k2_horizon",
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    ),
    "nemotron_nas": text_family(
        "DeciLMForCausalLM",
        model_type="nemotron-nas",
        num_hidden_layers=3,
        hidden_act="silu",
        block_configs=[
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 2.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
        ],
    ),
}
