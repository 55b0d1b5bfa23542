"""Random weights for an mlx-vlm model, in its own parameter names, scaled so that it is lively.

Lively: greedy tokens vary along a reply and depend on the image.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mlx.utils import tree_flatten
from mlx_vlm.utils import get_model_and_args, update_module_configs
from numpy.typing import NDArray
from safetensors.numpy import save as serialized

from vlm_server.runner.loading.checkpoint.view import text_model_of

HEAD_GAIN = 8.0
ATTENTION_GAIN = 2.0
QUIET_SCALE = 0.01
CONV_DIMS = 4
ATTENDING = ("q_proj", "k_proj", "qkv_proj", "query_key_value", "c_attn", "att_proj", "wqkv")
HEAD_NORMS = (
    "g_norm.weight",
    "q_norm.weight",
    "k_norm.weight",
    "query_layernorm.weight",
    "key_layernorm.weight",
)
MODULES = ["text", "vision", "perceiver", "projector", "audio"]
Array = NDArray[np.float32]


@dataclass(frozen=True)
class Style:
    """The part of a family's code that determines its random weights.

    `tied_head`: the head is the embedding, so the last norm carries the head's gain.
    `norm_offset`: what its norms add to their weights (Gemma's: 1).
    `tied_scale`: of a tied embedding, or a token's own would choose that token again.
    `conv_gain`: by how much weights of 2-D convolutions are larger.
    `last_norm`: what the norm before the head is called.
    `embedding`, `head`: what the table of tokens and the head are called.
    `writes`: whether there is a head; a model that makes vectors has none.
    `saved_prefix`: the beginning of mlx-vlm's names that the checkpoint's names lack.
    """

    tied_head: bool = False
    norm_offset: float = 0.0
    tied_scale: float = 0.25
    conv_gain: float = 1.0
    last_norm: str = "model.norm.weight"
    embedding: str = "embed_tokens.weight"
    writes: bool = True
    head: str = "lm_head.weight"
    saved_prefix: str = ""


def parameters(config: dict[str, Any], model_class: str = "Model") -> dict[str, Array]:
    """Name to default value, of every parameter of the model that `config` describes."""
    config = {"audio_config": {}} | config
    module, _ = get_model_and_args(config=config)
    with text_model_of(config):
        model_config = module.ModelConfig.from_dict(config)
        model_config = update_module_configs(model_config, module, config, MODULES)
        model = getattr(module, model_class)(model_config)
    return {name: np.array(value) for name, value in tree_flatten(model.parameters())}


def random_weights(
    config: dict[str, Any],
    quiet_ids: Collection[int],
    style: Style,
    seed: int,
    model_class: str = "Model",
) -> dict[str, Array]:
    """Float32 weights; the head never chooses one of `quiet_ids`."""
    rng = np.random.default_rng(seed)
    weights = {
        name: _draw(name, default, style, rng)
        for name, default in sorted(parameters(config, model_class).items())
        if not (style.tied_head and name.endswith(style.head))
    }
    if not style.writes:
        return weights
    quiet = sorted(quiet_ids)
    if style.tied_head:
        embeddings = _only(weights, "language_model", style.embedding)
        embeddings *= style.tied_scale
        embeddings[quiet] *= QUIET_SCALE
        norm = _only(weights, "language_model", style.last_norm)
        norm[:] = (norm + style.norm_offset) * HEAD_GAIN / style.tied_scale - style.norm_offset
    else:
        head = _only(weights, "language_model", style.head)
        head *= HEAD_GAIN
        head[[number for number in quiet if number < len(head)]] = 0.0
    return {name.removeprefix(style.saved_prefix): array for name, array in weights.items()}


def save(weights: dict[str, Array], path: Path) -> None:
    """Write a safetensors file whose bytes depend on nothing but the weights."""
    path.write_bytes(serialized(weights, metadata={"format": "mlx"}))


def _draw(name: str, default: Array, style: Style, rng: np.random.Generator) -> Array:
    if default.ndim == 0:
        return np.asarray(default * (1.0 + 0.1 * rng.standard_normal()), np.float32)
    if default.ndim == 1 or name.endswith((*HEAD_NORMS, "A_log")):
        return random_vector(name, default, style, rng)
    noise = rng.standard_normal(default.shape)
    return (scale_of(name, default.shape, style) * noise).astype(np.float32)


def scale_of(name: str, shape: tuple[int, ...], style: Style) -> float:
    """The standard deviation of a parameter of two or more dimensions."""
    if any(part in name for part in ("position", "pos_embed", "cls_token")):
        return 0.5
    if "embed_tokens" in name or name.endswith(style.embedding):
        return float(shape[-1] ** -0.5)
    attends = any(part in name.lower() for part in ATTENDING)
    gain = ATTENTION_GAIN if attends else 1.0
    gain *= style.conv_gain if len(shape) == CONV_DIMS else 1.0
    return float(gain / np.sqrt(np.prod(_fan_in(name, shape))))


def random_vector(name: str, default: Array, style: Style, rng: np.random.Generator) -> Array:
    """Norms vary around one, biases around zero, the decay of a recurrent layer in its range."""
    noise = rng.standard_normal(default.shape)
    return _vector(name, default, style, rng, noise).astype(np.float32)


def _vector(
    name: str, default: Array, style: Style, rng: np.random.Generator, noise: NDArray[np.float64]
) -> NDArray[np.float64]:
    if name.endswith("A_log"):
        return np.log(rng.uniform(1.0, 4.0, default.shape))
    if name.endswith(HEAD_NORMS):  # these undo the projections' gain
        return ATTENTION_GAIN * (1.0 + 0.1 * noise) - style.norm_offset
    if np.all(default == 1.0):
        return 1.0 + 0.1 * noise - style.norm_offset
    return 0.1 * noise


def _fan_in(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axes a product sums over: all but the first, or the last of stacked experts."""
    if "switch_mlp" in name or "experts" in name:
        return shape[-1:]
    if name.endswith("mm_input_projection_weight"):
        return shape[:1]
    return shape[1:]


def _only(weights: dict[str, Array], part: str, suffix: str) -> Array:
    (name,) = [name for name in weights if part in name and name.endswith(suffix)]
    return weights[name]
