"""Random weights for an mlx-vlm model, in its own parameter names, scaled so that it is lively.

Lively: greedy tokens vary along a reply and depend on the picture.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_vlm.utils import get_model_and_args, update_module_configs
from numpy.typing import NDArray
from safetensors.numpy import save_file

HEAD_GAIN = 8.0
ATTENTION_GAIN = 2.0
QUIET_SCALE = 0.01
MODULES = ["text", "vision", "perceiver", "projector", "audio"]
Array = NDArray[np.float32]


def parameters(config: dict[str, Any], seed: int) -> dict[str, Array]:
    """Name → shape-giving default of every parameter of the model that `config` describes."""
    config = {"audio_config": {}} | config
    module, _ = get_model_and_args(config=config)
    model_config = module.ModelConfig.from_dict(config)
    model_config = update_module_configs(model_config, module, config, MODULES)
    mx.random.seed(seed)
    model = module.Model(model_config)
    return {name: np.array(value) for name, value in tree_flatten(model.parameters())}


def random_weights(
    config: dict[str, Any], quiet_ids: Collection[int], tied_head: bool, seed: int
) -> dict[str, Array]:
    """Float32 weights. With a tied head the last norm carries the head's gain."""
    rng = np.random.default_rng(seed)
    weights = {
        name: _draw(name, default, rng)
        for name, default in sorted(parameters(config, seed).items())
        if not (tied_head and name.endswith("lm_head.weight"))
    }
    quiet = sorted(quiet_ids)
    if tied_head:
        _only(weights, "language_model", "embed_tokens.weight")[quiet] *= QUIET_SCALE
        norm = _only(weights, "language_model", "model.norm.weight")
        norm *= HEAD_GAIN
    else:
        head = _only(weights, "language_model", "lm_head.weight")
        head *= HEAD_GAIN
        head[quiet] = 0.0
    return weights


def save(weights: dict[str, Array], path: Path) -> None:
    """Write a safetensors file whose bytes depend on nothing but the weights."""
    save_file(weights, path, metadata={"format": "mlx"})


def _draw(name: str, default: Array, rng: np.random.Generator) -> Array:
    noise = rng.standard_normal(default.shape)
    if default.ndim == 1:
        constant = default[0] if np.all(default == default[0]) else 0.0
        values = constant + 0.1 * noise
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            values = values * ATTENTION_GAIN
        elif name.endswith("A_log"):
            values = np.log(rng.uniform(0.5, 4.0, default.shape))
    elif any(part in name for part in ("position", "pos_embed", "cls_token")):
        values = 0.5 * noise
    elif "embed_tokens" in name:
        values = noise / np.sqrt(default.shape[-1])
    else:
        gain = ATTENTION_GAIN if "q_proj" in name or "k_proj" in name else 1.0
        values = gain * noise / np.sqrt(np.prod(_fan_in(name, default.shape)))
    return values.astype(np.float32)


def _fan_in(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axes a product sums over: all but the first, or the last of stacked experts."""
    if "switch_mlp" in name or "experts" in name:
        return shape[-1:]
    if name.endswith("mm_input_projection_weight"):
        return shape[:1]
    return shape[1:]


def _only(weights: dict[str, Array], prefix: str, suffix: str) -> Array:
    (name,) = [name for name in weights if name.startswith(prefix) and name.endswith(suffix)]
    return weights[name]
