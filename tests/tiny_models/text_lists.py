"""Text models with several caches in each layer."""

from __future__ import annotations

from typing import Any

from tests.tiny_models.checkpoint import Family
from tests.tiny_models.text import WINDOW, named, text_family
from tests.tiny_models.text_parts import INDEXED, LATENT, ROUTED

LONGCAT: dict[str, Any] = {
    "zero_expert_type": "identity",
    "ffn_hidden_size": 128,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "num_layers": 2,
    "routed_scaling_factor": 2.0,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "attention_bias": False,
}
LISTS: dict[str, Family] = named(
    longcat_flash=text_family(
        "LongcatFlashForCausalLM", attention_method="MLA", **LONGCAT | LATENT
    ),
    longcat_flash_ngram=text_family(
        "LongcatFlashNgramForCausalLM",
        ngram_vocab_size_ratio=2,
        emb_neighbor_num=3,
        emb_split_num=2,
        **LONGCAT | LATENT,
    ),
    longcat_flash_sparse=text_family(
        "LongcatFlashSparseForCausalLM", attention_method="LSA", **INDEXED | LONGCAT | LATENT
    ),
    deepseek_v32=text_family(
        "DeepseekV32ForCausalLM", num_hidden_layers=3, **INDEXED | ROUTED | LATENT
    ),
    glm_moe_dsa=text_family(
        "GlmMoeDsaForCausalLM",
        num_hidden_layers=4,
        attention_bias=False,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        moe_layer_freq=1,
        indexer_types=["full", "full", "shared", "full"],
        rope_parameters={"rope_theta": 100000.0, "rope_type": "default"},
        **INDEXED | ROUTED | LATENT,
    ),
    baichuan_m1=text_family(
        "BaichuanM1ForCausalLM",
        sliding_window=WINDOW,
        sliding_window_layers=[1, 3],
        conv_window=2,
        num_swa_attention_heads=4,
        num_swa_key_value_heads=2,
    ),
)
