"""Text models of attention and dense layers alone; some see a window in each second layer."""

from __future__ import annotations

from typing import Any

from tests.tiny_models import gemma, gemma4
from tests.tiny_models.checkpoint import Checkpoint, Family
from tests.tiny_models.text import WINDOW, named, text_family, tied, windows
from tests.tiny_models.text_parts import COHERE, GRANITE, LATENT, MINICPM
from tests.tiny_models.vocabulary import Vocabulary
from tests.tiny_models.weights import Style

FINAL_LAYERNORM = "model.final_layernorm.weight"


def _gemma_text(vocabulary: Vocabulary, style: Style, config: dict[str, Any]) -> Checkpoint:
    return Checkpoint(
        config=config | {"vocab_size": len(vocabulary)},
        template=gemma.TEMPLATE,
        eos=("<end_of_turn>", "<eos>"),
        pad="<pad>",
        files={},
        style=style,
    )


def _gemma(vocabulary: Vocabulary, **further: Any) -> Checkpoint:
    config = {
        "architectures": ["GemmaForCausalLM"],
        "model_type": "gemma",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
    }
    return _gemma_text(vocabulary, tied(norm_offset=1.0), config | further)


def _gemma2(vocabulary: Vocabulary) -> Checkpoint:
    return _gemma(
        vocabulary,
        architectures=["Gemma2ForCausalLM"],
        model_type="gemma2",
        num_key_value_heads=2,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
    )


def _gemma3(vocabulary: Vocabulary) -> Checkpoint:
    whole: dict[str, Any] = gemma.GEMMA3.describe(vocabulary).config["text_config"]
    config = whole | {
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
    }
    return _gemma_text(vocabulary, tied(norm_offset=1.0), config)


def _gemma4(vocabulary: Vocabulary) -> Checkpoint:
    made = gemma4.GEMMA4.describe(vocabulary)
    text: dict[str, Any] = made.config["text_config"]
    config = text | {"architectures": ["Gemma4ForCausalLM"], "sliding_window": WINDOW}
    return Checkpoint(
        config=config,
        template=made.template,
        eos=made.eos,
        pad=made.pad,
        files={},
        style=made.style,
    )


DENSE: dict[str, Family] = named(
    llama=text_family("LlamaForCausalLM"),
    mistral=text_family("MistralForCausalLM", **windows(4)),
    ministral3=text_family(
        "Ministral3ForCausalLM",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 2.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 4096,
        },
        **windows(4),
    ),
    qwen2=text_family("Qwen2ForCausalLM", tied()),
    qwen3=text_family("Qwen3ForCausalLM", tied(), head_dim=32),
    gemma=Family(gemma.SPECIALS, _gemma, bos="<bos>"),
    gemma2=Family(gemma.SPECIALS, _gemma2, bos="<bos>"),
    gemma3_text=Family(gemma.SPECIALS, _gemma3, bos="<bos>"),
    gemma4_text=Family(gemma4.SPECIALS, _gemma4, bos="<bos>"),
    phi=text_family(
        "PhiForCausalLM",
        Style(last_norm=FINAL_LAYERNORM),
        num_key_value_heads=4,
        partial_rotary_factor=0.5,
        layer_norm_eps=1e-5,
    ),
    phi3=text_family("Phi3ForCausalLM"),
    smollm3=text_family("SmolLM3ForCausalLM", tied(), no_rope_layer_interval=2),
    granite=text_family("GraniteForCausalLM", tied(), mlp_bias=False, **GRANITE),
    glm4=text_family("Glm4ForCausalLM", attention_bias=True, partial_rotary_factor=0.5),
    olmo2=text_family("Olmo2ForCausalLM"),
    olmo3=text_family("Olmo3ForCausalLM", **windows(4)),
    seed_oss=text_family("SeedOssForCausalLM", attention_bias=True),
    cohere=text_family("CohereForCausalLM", tied(), use_qk_norm=True, **COHERE),
    cohere2=text_family(
        "Cohere2ForCausalLM", tied(), sliding_window_pattern=2, **COHERE | windows(4)
    ),
    exaone4=text_family(
        "Exaone4ForCausalLM", rope_scaling=None, sliding_window_pattern="LG", **windows(4)
    ),
    starcoder2=text_family(
        "Starcoder2ForCausalLM",
        tied(),
        num_hidden_layers=3,
        intermediate_size=256,
        norm_epsilon=1e-5,
    ),
    stablelm=text_family(
        "StableLmForCausalLM", use_qkv_bias=True, partial_rotary_factor=0.5, layer_norm_eps=1e-5
    ),
    internlm3=text_family("InternLM3ForCausalLM"),
    ernie4_5=text_family("Ernie4_5ForCausalLM", tied(), use_bias=False),
    hunyuan_v1_dense=text_family("HunYuanDenseV1ForCausalLM", tied()),
    apertus=text_family(
        "ApertusForCausalLM", mlp_bias=False, attention_bias=False, post_norm=False, qk_norm=True
    ),
    glm=text_family("GlmForCausalLM", attention_bias=True),
    helium=text_family("HeliumForCausalLM", attention_bias=False, mlp_bias=False),
    mimo=text_family("MiMoForCausalLM", attention_bias=True, num_nextn_predict_layers=1),
    minicpm=text_family("MiniCPMForCausalLM", Style(saved_prefix="language_model."), **MINICPM),
    minicpm3=text_family(
        "MiniCPM3ForCausalLM",
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
        **MINICPM,
    ),
    nemotron=text_family(
        "NemotronForCausalLM",
        Style(norm_offset=1.0),
        hidden_act="relu2",
        norm_eps=1e-5,
        partial_rotary_factor=0.5,
    ),
    telechat3=text_family("TeleChat3ForCausalLM", rope_scaling=None),
    youtu_llm=text_family("YoutuForCausalLM", **LATENT),
    llama4_text=text_family(
        "Llama4ForCausalLM",
        tied(tied_scale=0.1),
        intermediate_size_mlp=128,
        no_rope_layers=[1, 1, 1, 0],
        use_qk_norm=True,
    ),
    k2_horizon=text_family(
        "K2HorizonForCausalLM", rope_parameters={"rope_type": "default", "rope_theta": 100000.0}
    ),
    nemotron_nas=text_family(
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
)
