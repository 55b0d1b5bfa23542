"""LoRA adapters of a model that is being loaded: from their files' names to its layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn import Linear, QuantizedLinear  # type: ignore[attr-defined]  # mlx.nn is not typed

from vlm_server.errors import ModelLoadError
from vlm_server.runner.device.arrays import to_numpy
from vlm_server.runner.families.family import Family
from vlm_server.runner.kv.layers import can_batch, new_layers
from vlm_server.runner.loading.adapter_files import LowRank, read_adapter
from vlm_server.runner.model.adapters import BASE, Adapter, LayerDelta, chosen, reached
from vlm_server.runner.model.mrope import forget_positions

_IN_LAYERS = re.compile(
    r"(?:(?:model|language_model|text_model|thinker|backbone|transformer|layers)\.)*?"
    r"(?:layers|blocks|h)\.(\d+\..+)"
)
"""A module of the language model's layers, in the names of mlx-vlm and of all transformers; a
vision tower's have other parts before them."""


_OF_EXPERTS = re.compile(r"\bexperts\.\d+(\.|$)")
"""A layer of one of a list of experts, which gets some tokens: whose, it can't tell."""


def read_adapters(folders: Mapping[str, str], family: Family, model: Any) -> tuple[Adapter, ...]:
    """The adapters in `folders`, by name, for a model whose weights may be lazy; lazy, too.

    Raises ModelLoadError if one can't be served with this model.
    """
    if not folders:
        return ()
    if family.embeds is not None:
        raise ModelLoadError(f"{family.name} makes vectors: adapters of it can't be served")
    layers = _layers_of(model.language_model)
    return tuple(_read(name, Path(folder), layers) for name, folder in folders.items())


def check_finite(adapters: Iterable[Adapter]) -> None:
    """Raises ModelLoadError for an adapter with a number that is not finite."""
    for adapter in adapters:
        are_finite = mx.stack([mx.isfinite(array).all() for array in adapter.arrays])
        if not to_numpy(are_finite).all():
            raise ModelLoadError(f"the adapter `{adapter.name}` has numbers that are not finite")


def check_applied(language_model: Any, family: Family, adapters: Sequence[Adapter]) -> None:
    """Raises ModelLoadError if passes of the model, which are not computed here, would ignore a
    part of its attached adapters, or can't tell rows apart."""
    for width in (1, 2):
        cache = new_layers(language_model)
        numbers = mx.array([[BASE + 1], [BASE]][: 2 if can_batch(cache) else 1])
        token_ids = mx.zeros((len(numbers), width), mx.int32)
        try:
            with reached() as layers, chosen(numbers):
                language_model(token_ids, cache=cache)
        except NotImplementedError as error:
            raise ModelLoadError(f"{family.name} can't be served with adapters: {error}") from None
        forget_positions(language_model)
        for adapter in adapters:
            for delta in adapter.deltas:
                if id(delta.layer) not in layers and to_numpy(mx.any(delta.b)):
                    raise ModelLoadError(
                        f"the adapter `{adapter.name}` changes layer {delta.name}, which mlx-vlm's "
                        f"{family.name} does not call"
                    )


def _read(name: str, folder: Path, layers: Mapping[str, Any]) -> Adapter:
    try:
        files = read_adapter(folder)
        for layer_name, expected in files.base_quantization.items():
            if (layer := layers.get(_place_of(layer_name))) is not None:
                _check_quantization(layer_name, layer, expected)
        deltas = tuple(_delta(at, delta, layers) for at, delta in files.layers.items())
        places = {id(delta.layer) for delta in deltas}
        if len(places) < len(deltas):
            raise ModelLoadError("it names a layer twice")
    except ModelLoadError as error:
        raise ModelLoadError(f"the adapter `{name}` in {folder}: {error}") from None
    return Adapter(name, files.digest, deltas)


def _layers_of(language_model: Any) -> dict[str, Any]:
    """The modules of the language model's layers, by their place: `0.self_attn.q_proj`."""
    modules = ((_place_of(name), module) for name, module in language_model.named_modules())
    return {place: module for place, module in modules if place}


def _place_of(name: str) -> str:
    """The part of a module's name after `layers.`; empty if it is outside of the layers."""
    match = _IN_LAYERS.fullmatch(name)
    return match[1] if match else ""


def _delta(name: str, low_rank: LowRank, layers: Mapping[str, Any]) -> LayerDelta:
    place = _place_of(name)
    if not place:
        raise ModelLoadError(
            f"it adapts {name[:200]!r}, and only linear layers of the language model's layers can "
            "be: train it without vision tower, embeddings and lm_head"
        )
    layer = layers.get(place)
    if layer is None:
        raise ModelLoadError(f"this model has no {name[:200]!r}: it was trained on another base")
    if not isinstance(layer, Linear | QuantizedLinear) or _OF_EXPERTS.search(place):
        raise ModelLoadError(f"it adapts {name[:200]!r}, which is no linear layer of all tokens")
    shape, own_shape = (low_rank.a.shape[0], low_rank.b.shape[1]), _shape_of(layer)
    if shape != own_shape:
        raise ModelLoadError(
            f"{name[:200]!r} has {own_shape[0]} inputs and {own_shape[1]} outputs in this model, "
            f"and {shape[0]} and {shape[1]} in the adapter: it was trained on another base"
        )
    dtype = _dtype_of(layer)
    b = low_rank.b.astype(mx.float32) * low_rank.scale
    return LayerDelta(place, layer, low_rank.a.astype(dtype), b.astype(dtype))


def _shape_of(layer: Any) -> tuple[int, int]:
    """Numbers of inputs and outputs."""
    outputs, inputs = layer.weight.shape
    return (inputs * 32 // layer.bits if "scales" in layer else inputs), outputs


def _dtype_of(layer: Any) -> mx.Dtype:
    """The type of the layer's outputs; float32 if its scales are packed, too, and do not tell."""
    dtype = (layer.scales if "scales" in layer else layer.weight).dtype
    return dtype if mx.issubdtype(dtype, mx.floating) else mx.float32


def _check_quantization(name: str, layer: Any, expected: Any) -> None:
    """Raises ModelLoadError unless `layer` is quantized as the adapter's base was."""
    own = (
        {"bits": layer.bits, "group_size": layer.group_size, "mode": layer.mode}
        if "scales" in layer
        else None
    )
    if own != expected:
        raise ModelLoadError(
            f"it was trained on a base with {name[:200]!r} quantized as {str(expected)[:100]}, "
            f"which is {own or 'not quantized'} here"
        )
