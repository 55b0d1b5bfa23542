"""Tiny draft heads, for tiny models of the same width.

The next token of a random model depends on all before it, which no head can guess. So the model is
written with layers that add little to what a token's embedding is, and the head as one that adds
nothing: it guesses the model's token as often as `strength` lets it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.tiny_models.weights import Array, save

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_ADDING = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "fc2.weight")
"""The last matrix of each part of a layer."""
_SCALING = (
    "post_attention_layernorm.weight",
    "post_feedforward_layernorm.weight",
    "post_per_layer_input_norm.weight",
)
"""The last weight of each part of a Gemma 4 layer, whose size makes up for that of the others."""
_LAYER = "language_model.model.layers.{}."
NEMOTRON = {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
"""What `config.json` of a Nemotron-H with a head has besides."""
EAGLE = "eagle3"
_SHARPNESS = 4.0
"""Of the queries and keys of a head that attends to the newest token alone."""
_ATTENDING = 3
"""A layer of tiny Qwen3.5 that attends to all tokens."""


def with_weak_layers(source: Path, folder: Path, strength: float) -> Path:
    """The checkpoint in `source` whose language model's layers add `strength` of what they did."""
    shutil.copytree(source, folder)
    weights = load_file(source / WEIGHTS)
    last = _SCALING if _has_scales(weights) else _ADDING
    for name, array in weights.items():
        if name.startswith("language_model.") and name.endswith(last):
            weights[name] = (strength * array).astype(np.float32)
    save(weights, folder / WEIGHTS)
    return folder


def _has_scales(weights: dict[str, Array]) -> bool:
    return any(name.endswith("post_feedforward_layernorm.weight") for name in weights)


def head_of(qwen: Path, *, is_idle: bool = True) -> dict[str, Array]:
    """A head for models of the width of tiny Qwen3.5, in `qwen`, with a layer of that.

    If it `is_idle`, it guesses by the newest token alone, else by what the layer makes of both.
    """
    weights = load_file(qwen / WEIGHTS)
    size = len(weights["language_model.model.norm.weight"])
    prefix = _LAYER.format(_ATTENDING)
    scale = 0.0 if is_idle else 1.0
    head = {
        "fc.weight": np.concatenate([np.eye(size), (1 - is_idle) * np.eye(size)], axis=1),
        "pre_fc_norm_embedding.weight": np.ones(size),
        "pre_fc_norm_hidden.weight": np.ones(size),
        "norm.weight": weights["language_model.model.norm.weight"],
    }
    for name, array in weights.items():
        if name.startswith(prefix):
            factor = scale if name.endswith(_ADDING) else 1.0
            head[f"layers.0.{name.removeprefix(prefix)}"] = factor * array
    return {name: array.astype(np.float32) for name, array in head.items()}


def write_head(qwen: Path, folder: Path, model: Path, *, is_idle: bool = True) -> Path:
    """A folder with a head alone, as mlx-vlm splits it off, for the checkpoint in `model`."""
    text, of_model = (
        whole.get("text_config", whole)
        for whole in (json.loads((source / CONFIG).read_text()) for source in (qwen, model))
    )
    sizes = {"vocab_size": of_model["vocab_size"], "mtp_num_hidden_layers": 1}
    config = {"model_type": "qwen3_5_mtp", "text_config": text | sizes, "block_size": 3}
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(config))
    save(head_of(qwen, is_idle=is_idle), folder / WEIGHTS)
    return folder


def add_head(folder: Path, *, is_idle: bool = True) -> Path:
    """Write the head into the weights of tiny Qwen3.5 in `folder`, where its makers have it."""
    weights = load_file(folder / WEIGHTS)
    head = {f"mtp.{name}": array for name, array in head_of(folder, is_idle=is_idle).items()}
    save(weights | head, folder / WEIGHTS)
    return folder


def nemotron_head_of(model: Path, *, is_idle: bool = True) -> dict[str, Array]:
    """A head for tiny Nemotron-H, in `model`: one of its layers that attends, one with experts."""
    weights = load_file(model / WEIGHTS)
    size = len(weights["language_model.backbone.norm_f.weight"])
    head = {
        "layers.0.enorm.weight": np.ones(size),
        "layers.0.hnorm.weight": np.ones(size),
        "layers.0.eh_proj.weight": np.concatenate(
            [np.eye(size), (1 - is_idle) * np.eye(size)], axis=1
        ),
        "layers.1.final_layernorm.weight": weights["language_model.backbone.norm_f.weight"],
    }
    for number, kind in enumerate(NEMOTRON["mtp_hybrid_override_pattern"]):
        layer = f"language_model.backbone.layers.{'M*-ME'.index(kind)}."
        for name, array in weights.items():
            if name.startswith(layer):
                factor = 0.0 if is_idle and name.endswith(_ADDING) else 1.0
                head[f"layers.{number}.{name.removeprefix(layer)}"] = factor * array
    return {name: array.astype(np.float32) for name, array in head.items()}


def write_nemotron_head(model: Path, folder: Path, *, is_idle: bool = True) -> Path:
    """A folder with a head alone for the checkpoint of tiny Nemotron-H in `model`."""
    text = json.loads((model / CONFIG).read_text()) | NEMOTRON
    folder.mkdir()
    config = {"model_type": "nemotron_h_mtp", "text_config": text}
    (folder / CONFIG).write_text(json.dumps(config))
    save(nemotron_head_of(model, is_idle=is_idle), folder / WEIGHTS)
    return folder


def write_eagle(model: Path, folder: Path, *, is_idle: bool = True) -> Path:
    """An EAGLE-3 head, as Speculators saves it, for the checkpoint in `model`.

    If it `is_idle`, its layer copies the newest token's embedding, else it is random. It can guess
    two thirds of the vocabulary.
    """
    weights = load_file(model / WEIGHTS)
    embeddings = weights["language_model.model.embed_tokens.weight"]
    vocabulary, size = embeddings.shape
    kept = np.array([number for number in range(vocabulary) if number % 3])
    config = {
        "speculators_model_type": EAGLE,
        "draft_vocab_size": len(kept),
        "target_hidden_size": size,
        "norm_before_residual": is_idle,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "transformer_layer_config": {
            "hidden_size": size,
            "intermediate_size": 2 * size,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "vocab_size": vocabulary,
        },
    }
    rng, gain, both = np.random.default_rng(3), size**-0.5, (size, 2 * size)
    copying = np.concatenate([np.eye(size), np.zeros((size, size))], axis=1)
    sharp = _SHARPNESS * copying

    def matrix(idle: Array, shape: tuple[int, ...]) -> Array:
        return idle if is_idle else (gain * rng.standard_normal(shape)).astype(np.float32)

    nothing, ones = np.zeros((size, size)), np.ones(size)
    head = {
        "embed_tokens.weight": embeddings,
        "fc.weight": matrix(np.zeros((size, 3 * size)), (size, 3 * size)),
        "norm.weight": weights["language_model.model.norm.weight"],
        "lm_head.weight": weights.get("language_model.lm_head.weight", embeddings)[kept],
        "d2t": (kept - np.arange(len(kept))).astype(np.int64),
        "layers.0.input_layernorm.weight": ones,
        "layers.0.hidden_norm.weight": nothing[0] if is_idle else ones,
        "layers.0.post_attention_layernorm.weight": ones,
        "layers.0.self_attn.q_proj.weight": matrix(sharp, both),
        "layers.0.self_attn.k_proj.weight": matrix(sharp, both),
        "layers.0.self_attn.v_proj.weight": matrix(copying, both),
        "layers.0.self_attn.o_proj.weight": matrix(np.eye(size), (size, size)),
        "layers.0.mlp.gate_proj.weight": matrix(np.zeros((2 * size, size)), (2 * size, size)),
        "layers.0.mlp.up_proj.weight": matrix(np.zeros((2 * size, size)), (2 * size, size)),
        "layers.0.mlp.down_proj.weight": matrix(np.zeros((size, 2 * size)), (size, 2 * size)),
    }
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(config))
    save(
        {
            name: array if name == "d2t" else array.astype(np.float32)
            for name, array in head.items()
        },
        folder / WEIGHTS,
    )
    return folder


def write_assistant(
    model: Path, folder: Path, *, is_idle: bool = True, num_centroids: int = 0
) -> Path:
    """An assistant for the checkpoint of tiny Gemma 4 in `model`, of two of its layers.

    With `num_centroids` it scores the tokens of the likeliest groups alone.
    """
    weights, config = load_file(model / WEIGHTS), json.loads((model / CONFIG).read_text())
    text = config.get("text_config", config)
    layers = {"sliding_attention": 3, "full_attention": 2}
    left_out = ("k_proj", "v_proj", "k_norm", "per_layer")
    embeddings = weights["language_model.model.embed_tokens.weight"]
    vocabulary, size = embeddings.shape
    rng = np.random.default_rng(4)
    head = {
        "model.embed_tokens.weight": embeddings,
        "model.norm.weight": weights["language_model.model.norm.weight"],
        "pre_projection.weight": np.concatenate(
            [np.eye(size), (1 - is_idle) * np.eye(size)], axis=1
        ),
        "post_projection.weight": np.eye(size),
    }
    for number, place in enumerate(layers.values()):
        prefix = _LAYER.format(place)
        for name, array in weights.items():
            if name.startswith(prefix) and not any(part in name for part in left_out):
                factor = 0.0 if is_idle and name.endswith(_SCALING) else 1.0
                head[f"model.layers.{number}.{name.removeprefix(prefix)}"] = factor * array
    if num_centroids:
        head["masked_embedding.centroids.weight"] = rng.standard_normal((num_centroids, size))
        head["masked_embedding.token_ordering"] = rng.permutation(vocabulary)
    sizes = {
        "num_hidden_layers": 2,
        "layer_types": list(layers),
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
    }
    folder.mkdir()
    assistant = {
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": size,
        "use_ordered_embeddings": bool(num_centroids),
        "num_centroids": num_centroids,
        "centroid_intermediate_top_k": num_centroids // 2,
        "text_config": text | sizes,
    }
    (folder / CONFIG).write_text(json.dumps(assistant))
    save(
        {
            name: array.astype(np.int64 if name.endswith("ordering") else np.float32)
            for name, array in head.items()
        },
        folder / WEIGHTS,
    )
    return folder


DFLASH = {
    "model_type": "qwen3",
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2]},
}
"""What the `config.json` of a block head for a tiny model of four layers has, but for sizes."""


def dflash_config(model: Path) -> dict[str, Any]:
    """The `config.json` of a block head for the checkpoint in `model`."""
    config = json.loads((model / CONFIG).read_text())
    text = config.get("text_config", config)
    size = text["hidden_size"]
    sizes = {"hidden_size": size, "intermediate_size": 2 * size, "vocab_size": text["vocab_size"]}
    return DFLASH | sizes | {"num_target_layers": 4}


def write_dflash(model: Path, folder: Path, *, is_idle: bool = True) -> Path:
    """A head that guesses a block at once, for the checkpoint in `model`.

    If it `is_idle`, all of a block see the newest token alone, and guess what comes after that.
    """
    embeddings = load_file(model / WEIGHTS)["language_model.model.embed_tokens.weight"]
    config, size = dflash_config(model), embeddings.shape[1]
    rng, nothing, all_of = np.random.default_rng(5), np.zeros((size, size)), np.eye(size)
    mask = embeddings[DFLASH["dflash_config"]["mask_token_id"]]
    direction = mask / np.linalg.norm(mask)
    but_masks = 1e4 * (all_of - np.outer(direction, direction))

    def matrix(idle: Array) -> Array:
        return idle if is_idle else size**-0.5 * rng.standard_normal(idle.shape)

    def ones(count: int) -> Array:
        return np.ones(count)

    head = {
        "fc.weight": matrix(np.zeros((size, 2 * size))),
        "hidden_norm.weight": ones(size),
        "norm.weight": load_file(model / WEIGHTS)["language_model.model.norm.weight"],
    }
    for number in range(2):
        layer = {
            "self_attn.q_proj": matrix(all_of),
            "self_attn.k_proj": matrix(all_of),
            "self_attn.v_proj": matrix(nothing if number else but_masks),
            "self_attn.o_proj": matrix(all_of),
            "self_attn.q_norm": (1 - is_idle) * ones(16),
            "self_attn.k_norm": ones(16),
            "mlp.gate_proj": matrix(np.zeros((2 * size, size))),
            "mlp.up_proj": matrix(np.zeros((2 * size, size))),
            "mlp.down_proj": matrix(np.zeros((size, 2 * size))),
            "input_layernorm": ones(size),
            "post_attention_layernorm": ones(size),
        }
        head |= {f"layers.{number}.{name}.weight": array for name, array in layer.items()}
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(config))
    save({name: array.astype(np.float32) for name, array in head.items()}, folder / WEIGHTS)
    return folder
