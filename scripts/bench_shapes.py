"""The shapes of `bench_models`: what they change in the tiny model of their family."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A model's family, and what differs from the family's tiny model.

    config: of config.json. files: of its processors' settings, by file. specials: further special
    tokens. vocabulary_size: 0 for the tiny model's.
    """

    family: str
    config: Json
    vocabulary_size: int = 0
    files: dict[str, Json] = field(default_factory=dict)
    specials: tuple[str, ...] = ()
    dtype: str = "bfloat16"


def _text(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> Json:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32768,
    }


def _mrope(*section: int) -> Json:
    return {"rope_scaling": {"type": "mrope", "mrope_section": list(section)}}


def _qwen2_5(text: Json, vision: Json, vocabulary_size: int = 0) -> Shape:
    return Shape("qwen2_5_vl", text | {"vision_config": vision}, vocabulary_size)


def _tower(depth: int, hidden: int, heads: int, inner: int, out: int) -> Json:
    return {
        "depth": depth,
        "hidden_size": hidden,
        "num_heads": heads,
        "intermediate_size": inner,
        "out_hidden_size": out,
    }


def _qwen2_5_vision(depth: int, *sizes: int) -> Json:
    whole = list(range(depth // 4 - 1, depth, depth // 4))
    return _tower(depth, *sizes) | {"fullatt_block_indexes": whole}


def _qwen3_vision(*sizes: int, deepstack: tuple[int, ...] = ()) -> Json:
    more = {"num_position_embeddings": 2304, "deepstack_visual_indexes": list(deepstack)}
    return _tower(*sizes) | more


def _siglip(hidden: int, inner: int, layers: int, heads: int) -> Json:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


def _hybrid_layers(layers: int) -> list[str]:
    return ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * (
        layers // 4
    )


def _hybrid(layers: int, head_size: int, key_heads: int, heads: int, state_size: int) -> Json:
    quarter = head_size // 4 // 2
    return {
        "head_dim": head_size,
        "full_attention_interval": 4,
        "layer_types": _hybrid_layers(layers),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": state_size,
        "linear_value_head_dim": state_size,
        "rope_parameters": {
            "partial_rotary_factor": 0.25,
            "mrope_section": [quarter - 2 * (quarter // 3), quarter // 3, quarter // 3],
        },
    }


_GEMMA3_FILES = {
    "preprocessor_config.json": {"size": {"height": 896, "width": 896}, "image_seq_length": 256},
    "processor_config.json": {"image_seq_length": 256},
}
_SMOLVLM_FILES = {
    "preprocessor_config.json": {
        "size": {"longest_edge": 1536},
        "max_image_size": {"longest_edge": 384},
    },
    "processor_config.json": {"image_seq_len": 81},
}
_SMOLVLM_TILES = tuple(
    f"<row_{row}_col_{column}>"
    for row in range(1, 5)
    for column in range(1, 5)
    if max(row, column) > 2
)
_LFM2_FILES = {
    "preprocessor_config.json": {
        "encoder_patch_size": 16,
        "tile_size": 512,
        "min_image_tokens": 64,
        "max_image_tokens": 256,
    }
}
_GEMMA4_FILES = {
    "processor_config.json": {"image_processor": {"patch_size": 16, "max_soft_tokens": 280}}
}


def _gemma4_layers(layers: int) -> list[str]:
    return [*["sliding_attention"] * 5, "full_attention"] * (layers // 6)


def _lfm2_layers(layers: int, attending: tuple[int, ...]) -> list[str]:
    return ["full_attention" if each in attending else "conv" for each in range(layers)]


def _lfm2_text(hidden: int, inner: int, layers: list[str], heads: int, kv_heads: int) -> Json:
    sizes = ("block_dim", "conv_dim", "conv_dim_out")
    return _text(hidden, inner, len(layers), heads, kv_heads) | {
        **dict.fromkeys(sizes, hidden),
        "block_ff_dim": inner,
        "layer_types": layers,
    }


_LARGE = {
    "qwen3_5-4b": Shape(
        "qwen3_5",
        {
            "text_config": _text(2560, 9216, 32, 16, 4) | _hybrid(32, 256, 16, 32, 128),
            "vision_config": _qwen3_vision(24, 1024, 16, 4096, 2560),
        },
        151_936,
    ),
    "qwen3_5-35b-a3b": Shape(
        "qwen3_5_moe",
        {
            "text_config": _text(2048, 512, 40, 16, 2)
            | _hybrid(40, 256, 16, 32, 128)
            | {
                "num_experts": 256,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512,
            },
            "vision_config": _qwen3_vision(27, 1152, 16, 4304, 2048),
        },
        151_936,
    ),
    "qwen3_vl-4b": Shape(
        "qwen3_vl",
        {
            "text_config": _text(2560, 9728, 36, 32, 8)
            | {"head_dim": 128, "rope_scaling": {"mrope_section": [24, 20, 20]}},
            "vision_config": _qwen3_vision(24, 1024, 16, 4096, 2560, deepstack=(5, 11, 17)),
        },
        151_936,
    ),
    "gemma3-4b": Shape(
        "gemma3",
        {
            "hidden_size": 2560,
            "mm_tokens_per_image": 256,
            "text_config": _text(2560, 10240, 34, 8, 4)
            | {
                "head_dim": 256,
                "query_pre_attn_scalar": 256,
                "sliding_window": 1024,
                "sliding_window_pattern": 6,
                "mm_tokens_per_image": 256,
            },
            "vision_config": _siglip(1152, 4304, 27, 16) | {"image_size": 896},
        },
        262_144,
        _GEMMA3_FILES,
    ),
    "gemma4-e4b": Shape(
        "gemma4",
        {
            "hidden_size": 2560,
            "vision_soft_tokens_per_image": 280,
            "text_config": _text(2560, 10240, 42, 8, 2)
            | {
                "head_dim": 256,
                "global_head_dim": 512,
                "hidden_size_per_layer_input": 256,
                "num_kv_shared_layers": 18,
                "sliding_window": 512,
                "layer_types": _gemma4_layers(42),
            },
            "vision_config": _siglip(768, 3072, 16, 12)
            | {
                "num_key_value_heads": 12,
                "head_dim": 64,
                "global_head_dim": 64,
                "patch_size": 16,
                "position_embedding_size": 10240,
                "default_output_length": 280,
            },
        },
        262_144,
        _GEMMA4_FILES,
    ),
    "qwen2_5_vl-3b": _qwen2_5(
        _text(2048, 11008, 36, 16, 2) | _mrope(16, 24, 24),
        _qwen2_5_vision(32, 1280, 16, 3420, 2048),
        151_936,
    ),
    "qwen2_5_vl-14b": _qwen2_5(
        _text(5120, 13824, 48, 40, 8) | _mrope(16, 24, 24),
        _qwen2_5_vision(32, 1280, 16, 3420, 5120),
        151_936,
    ),
    "smolvlm-2.2b": Shape(
        "smolvlm",
        {
            "scale_factor": 3,
            "text_config": _text(2048, 8192, 24, 32, 32) | {"head_dim": 64},
            "vision_config": _siglip(1152, 4304, 27, 16) | {"image_size": 384, "patch_size": 14},
        },
        49_280,
        _SMOLVLM_FILES,
        _SMOLVLM_TILES,
    ),
    "lfm2_vl-1.6b": Shape(
        "lfm2_vl",
        {
            "projector_hidden_size": 2560,
            "text_config": _lfm2_text(2048, 8192, _lfm2_layers(16, (2, 5, 8, 10, 12, 14)), 32, 8),
            "vision_config": _siglip(1152, 4304, 27, 16) | {"num_patches": 256, "patch_size": 16},
        },
        65_536,
        _LFM2_FILES,
    ),
}
_SMALL_TEXT = _text(512, 1408, 8, 8, 2)
_SMALL_SIGLIP = _siglip(320, 864, 8, 4)
_SMALL = {
    "qwen3_5": {
        "text_config": _SMALL_TEXT | _hybrid(8, 64, 4, 8, 64),
        "vision_config": _qwen3_vision(8, 320, 4, 864, 512),
    },
    "qwen3_5_moe": {
        "text_config": _text(512, 256, 8, 8, 2)
        | _hybrid(8, 64, 4, 8, 64)
        | {
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
        },
        "vision_config": _qwen3_vision(8, 320, 4, 864, 512),
    },
    "qwen3_vl": {
        "text_config": _SMALL_TEXT
        | {"head_dim": 64, "rope_scaling": {"mrope_section": [12, 10, 10]}},
        "vision_config": _qwen3_vision(8, 320, 4, 864, 512, deepstack=(1, 3, 5)),
    },
    "gemma3": {
        "hidden_size": 512,
        "text_config": _SMALL_TEXT
        | {
            "head_dim": 64,
            "query_pre_attn_scalar": 64,
            "sliding_window": 512,
            "sliding_window_pattern": 4,
        },
        "vision_config": _SMALL_SIGLIP | {"image_size": 448},
    },
    "gemma4": {
        "hidden_size": 512,
        "vision_soft_tokens_per_image": 280,
        "text_config": _text(512, 1408, 12, 8, 2)
        | {
            "head_dim": 64,
            "global_head_dim": 128,
            "hidden_size_per_layer_input": 64,
            "num_kv_shared_layers": 4,
            "sliding_window": 512,
            "layer_types": _gemma4_layers(12),
        },
        "vision_config": _SMALL_SIGLIP
        | {
            "num_key_value_heads": 4,
            "head_dim": 80,
            "global_head_dim": 80,
            "patch_size": 16,
            "position_embedding_size": 10240,
            "default_output_length": 280,
        },
    },
    "smolvlm": {
        "scale_factor": 3,
        "text_config": _text(512, 1408, 8, 8, 8) | {"head_dim": 64},
        "vision_config": _SMALL_SIGLIP | {"image_size": 384, "patch_size": 14},
    },
    "lfm2_vl": {
        "projector_hidden_size": 512,
        "text_config": _lfm2_text(512, 1408, _lfm2_layers(8, (2, 5, 7)), 8, 2),
        "vision_config": _SMALL_SIGLIP | {"num_patches": 256, "patch_size": 16},
    },
}
"""By family: some 40 M parameters with a vocabulary of `_SMALL_VOCABULARY`."""
_SMALL_VOCABULARY = 16_384
_SMALL_GEMMA3_FILES = {"preprocessor_config.json": {"size": {"height": 448, "width": 448}}}
_FORMER = {
    "3b": _qwen2_5(
        _text(2048, 11008, 36, 16, 2) | _mrope(16, 24, 24),
        _qwen2_5_vision(32, 1280, 16, 3420, 2048),
    ),
    "1b": _qwen2_5(
        _text(1536, 6144, 18, 12, 2) | _mrope(16, 24, 24),
        _qwen2_5_vision(16, 640, 8, 1710, 1536),
    ),
}


def _small(shape: Shape) -> Shape:
    """The small make of a large one."""
    files = _SMALL_GEMMA3_FILES if shape.family == "gemma3" else shape.files
    return replace(
        shape,
        config=_SMALL[shape.family],
        vocabulary_size=_SMALL_VOCABULARY,
        files=files,
        dtype="float32",
    )


SHAPES = {
    **_LARGE,
    **{f"{name}-small": _small(shape) for name, shape in _LARGE.items() if shape.family in _SMALL},
    **_FORMER,
}
