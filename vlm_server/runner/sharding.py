"""Leaves in each rank its part of a model's weights.

A rank has some heads of every attention and some hidden units of every MLP, with the rows and
columns that belong to them; what it adds to the hidden states is summed over all ranks (tensor
parallelism, Shoeybi et al. 2019). mlx-vlm does that itself for some models. For those whose layers
are plain ones, whatever their family, it is done here with MLX's own layers.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.distributed import shard_linear

from vlm_server.errors import ModelLoadError

PLAIN_FAMILIES = frozenset(
    {
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_vl",
        "gemma3",
        "idefics3",
        "smolvlm",
        "pixtral",
        "mistral3",
        "aya_vision",
        "llava",
        "llava_onevision",
        "internvl_chat",
        "dots_ocr",
        "paddleocr_vl",
    }
)
"""Those of which tests show that they answer as one process does."""
_TO_PARTS = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}
_TO_ALL = {"self_attn": ("o_proj",), "mlp": ("down_proj",)}
_COUNTS = ("n_heads", "n_kv_heads")


def shard(model: Any, family: str, group: mx.distributed.Group) -> None:
    """Part `model`, whose weights are lazy, among all of `group`.

    Raises ModelLoadError if that is not known to be right, or if its heads can't be shared out.
    """
    language_model = model.language_model
    own = next((each for each in (model, language_model) if hasattr(each, "shard")), None)
    if own is None and family not in PLAIN_FAMILIES:
        raise ModelLoadError(
            f"a model of the family {family} can't be split over several processes "
            "(docs/distributed.md): serve it without distributed.hosts"
        )
    _check_heads(language_model, group.size())
    try:
        if own is not None:
            own.shard(group)
        else:
            for layer in language_model.layers:
                _shard_layer(layer, group)
    except ValueError as error:  # of MLX's: a quantized row can't be cut everywhere
        raise ModelLoadError(
            f"the model's weights can't be split over {group.size()} processes: {error}"
        ) from error


def _check_heads(language_model: Any, size: int) -> None:
    for layer in language_model.layers:
        for name in _COUNTS:
            count = getattr(getattr(layer, "self_attn", None), name, size)
            if count % size:
                kind = "attention" if name == "n_heads" else "key and value"
                raise ModelLoadError(
                    f"the model has {count} {kind} heads, which {size} processes can't share"
                )


def _shard_layer(layer: Any, group: mx.distributed.Group) -> None:
    for kind, names in (("all-to-sharded", _TO_PARTS), ("sharded-to-all", _TO_ALL)):
        for part, projections in names.items():
            module = getattr(layer, part)
            for name in projections:
                setattr(module, name, shard_linear(getattr(module, name), kind, group=group))
    for name in _COUNTS:
        setattr(layer.self_attn, name, getattr(layer.self_attn, name) // group.size())
