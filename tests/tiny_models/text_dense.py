"""Text models of attention and dense layers alone; some see a window in each second layer."""

from __future__ import annotations

from typing import Any

from tests.tiny_models import gemma, gemma4
from tests.tiny_models.checkpoint import Checkpoint, Family
from tests.tiny_models.text import WINDOW, text_family, tied, windows
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


def _gemma(vocabulary: Vocabulary) -> Checkpoint:
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
    return _gemma_text(vocabulary, tied(norm_offset=1.0), config)


def _gemma2(vocabulary: Vocabulary) -> Checkpoint:
    config = {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "rms_norm_eps": 1e-6,
        "sliding_window": WINDOW,
    }
    return _gemma_text(vocabulary, tied(norm_offset=1.0), config)


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


DENSE: dict[str, Family] = {
    "llama": text_family("LlamaForCausalLM"),
    "mistral": text_family("MistralForCausalLM", model_type="mistral", **windows(4)),
    "ministral3": text_family(
        "Ministral3ForCausalLM",
        model_type="ministral3",
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
    "qwen2": text_family("Qwen2ForCausalLM", tied(), model_type="qwen2"),
    "qwen3": text_family("Qwen3ForCausalLM", tied(), model_type="qwen3", head_dim=32),
    "gemma": Family(gemma.SPECIALS, _gemma, bos="<bos>"),
    "gemma2": Family(gemma.SPECIALS, _gemma2, bos="<bos>"),
    "gemma3_text": Family(gemma.SPECIALS, _gemma3, bos="<bos>"),
    "gemma4_text": Family(gemma4.SPECIALS, _gemma4, bos="<bos>"),
    "phi": text_family(
        "PhiForCausalLM",
        Style(last_norm=FINAL_LAYERNORM),
        model_type="phi",
        num_key_value_heads=4,
        partial_rotary_factor=0.5,
        layer_norm_eps=1e-5,
    ),
    "phi3": text_family("Phi3ForCausalLM", model_type="phi3"),
    "smollm3": text_family(
        "SmolLM3ForCausalLM", tied(), model_type="smollm3", no_rope_layer_interval=2
    ),
    "granite": text_family(
        "GraniteForCausalLM",
        tied(),
        model_type="granite",
        logits_scaling=2.0,
        attention_multiplier=0.25,
        embedding_multiplier=6.0,
        residual_multiplier=0.5,
        attention_bias=False,
        mlp_bias=False,
    ),
    "glm4": text_family(
        "Glm4ForCausalLM", model_type="glm4", attention_bias=True, partial_rotary_factor=0.5
    ),
    "olmo2": text_family("Olmo2ForCausalLM", model_type="olmo2"),
    "olmo3": text_family("Olmo3ForCausalLM", model_type="olmo3", **windows(4)),
    "seed_oss": text_family("SeedOssForCausalLM", model_type="seed_oss", attention_bias=True),
    "cohere": text_family(
        "CohereForCausalLM",
        tied(),
        model_type="cohere",
        layer_norm_eps=1e-5,
        logit_scale=0.5,
        use_qk_norm=True,
    ),
    "cohere2": text_family(
        "Cohere2ForCausalLM",
        tied(),
        model_type="cohere2",
        layer_norm_eps=1e-5,
        logit_scale=0.5,
        sliding_window_pattern=2,
        **windows(4),
    ),
    "exaone4": text_family(
        "Exaone4ForCausalLM",
        model_type="exaone4",
        rope_scaling=None,
        sliding_window_pattern="LG",
        **windows(4),
    ),
    "starcoder2": text_family(
        "Starcoder2ForCausalLM",
        tied(),
        model_type="starcoder2",
        num_hidden_layers=3,
        intermediate_size=256,
        norm_epsilon=1e-5,
    ),
    "stablelm": text_family(
        "StableLmForCausalLM",
        model_type="stablelm",
        use_qkv_bias=True,
        partial_rotary_factor=0.5,
        layer_norm_eps=1e-5,
    ),
    "internlm3": text_family("InternLM3ForCausalLM", model_type="internlm3"),
    "ernie4_5": text_family("Ernie4_5ForCausalLM", tied(), model_type="ernie4_5", use_bias=False),
    "hunyuan_v1_dense": text_family(
        "HunYuanDenseV1ForCausalLM", tied(), model_type="hunyuan_v1_dense"
    ),
    "apertus": text_family(
        "ApertusForCausalLM",
        model_type="apertus",
        mlp_bias=False,
        attention_bias=False,
        post_norm=False,
        qk_norm=True,
    ),
}
