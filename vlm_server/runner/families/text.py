"""Rows of families that read text alone, and write."""

from __future__ import annotations

from vlm_server.runner.families.corrections import gemma4
from vlm_server.runner.families.corrections.text import (
    count_positions_of_rows,
    group_masks,
    head_of_embeddings,
    remember_prompts,
    scale_all_embeddings,
    use_static_rope,
)
from vlm_server.runner.families.embedding import YesOrNo
from vlm_server.runner.families.family import Family, MRopeRule

_PLAIN = (
    "afmoe", "apertus", "baichuan_m1", "bailing_moe", "bailing_moe_linear", "cohere", "cohere2",
    "cohere2_moe", "dbrx", "deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1",
    "ernie4_5", "ernie4_5_moe", "exaone", "exaone4", "exaone_moe", "falcon_h1", "gemma",
    "gemma3_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt2",
    "gpt_neox", "gpt_oss", "granitemoehybrid", "helium", "hunyuan", "hunyuan_v1_dense",
    "iquestloopcoder", "jamba", "k2_horizon", "kimi_linear", "klear", "kolibri1", "laguna", "lfm2",
    "lfm2_moe", "lille_130m", "llama", "longcat_flash", "longcat_flash_sparse", "mamba", "mamba2",
    "mellum", "mimo", "mimo_v2_flash", "minimax", "ministral3", "mixtral", "nanochat", "nemotron",
    "nemotron_h", "nemotron_nas", "olmo", "olmo2", "olmo3", "olmoe", "openelm", "phi", "phi3",
    "phimoe", "phixtral", "plamo", "plamo2", "qwen", "qwen2", "qwen2_moe", "qwen3_moe",
    "qwen3_next", "recurrent_gemma", "rwkv7", "seed_oss", "smollm3", "solar_open", "spark2_5",
    "stablelm", "starcoder2", "step3p5", "telechat3", "xing4_0", "youtu_llm"
)  # fmt: skip
"""Families that read text alone, and need no more than a row."""
TEXT_ROWS = (
    *(Family(name, reads_images=False) for name in _PLAIN),
    Family("gemma2", reads_images=False, fix=group_masks),
    Family("gemma4_text", reads_images=False, fix=gemma4.correct),
    Family("gpt_bigcode", reads_images=False, fix=count_positions_of_rows),
    *(
        Family(name, reads_images=False, fix=scale_all_embeddings)
        for name in ("granite", "granitemoe", "minicpm", "minicpm3")
    ),
    *(Family(name, reads_images=False, fix=use_static_rope) for name in ("internlm2", "internlm3")),
    Family("llama4_text", reads_images=False, fix=head_of_embeddings),
    Family("longcat_flash_ngram", reads_images=False, fix=remember_prompts),
    Family(
        "qwen3",
        reads_images=False,
        judges=YesOrNo(
            "Given a web search query, retrieve relevant passages that answer the query",
            before_query="\n<Query>: ",
            before_document="\n<Document>: ",
        ),
    ),
    *(
        Family(
            name,
            reads_images=False,
            mrope=MRopeRule.ASK_MODEL,
            needs_even_rows=True,
        )
        for name in ("qwen3_5_moe_text", "qwen3_5_text")
    ),
)
