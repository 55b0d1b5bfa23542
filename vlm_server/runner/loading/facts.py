"""What clients are told of a model that was loaded."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from vlm_server.hub.layout import visible_files
from vlm_server.protocol import ModelFacts
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.loading.evaluate import arrays_of

_PACKED_BITS = 32
"""Quantized weights are packed into integers of so many bits."""
_FILES = ("*.safetensors", "config.json")


def model_facts(loaded: LoadedModel, folder: Path) -> ModelFacts:
    """The facts of the model from `folder`."""
    parameters = _parameters(loaded)
    rule = loaded.host.pixel_rule
    quantization = max(parameters, key=parameters.__getitem__, default="")
    return ModelFacts(
        family=loaded.family.name,
        num_parameters=parameters.total(),
        size_bytes=sum(array.nbytes for array in arrays_of(loaded.model)),
        quantization=quantization,
        digest=loaded.checkpoint.digest(),
        modified_at=_modified_at(folder),
        capabilities=_capabilities(loaded),
        context_tokens=loaded.host.context_tokens,
        min_image_pixels=rule.min_pixels if rule else 0,
        max_image_pixels=rule.max_pixels if rule else 0,
        image_side_multiple=rule.factor if rule else 0,
        coordinates=loaded.family.coordinates,
        warnings=(*loaded.family.warnings, *loaded.host.warnings),
    )


def _capabilities(loaded: LoadedModel) -> tuple[str, ...]:
    """Videos are shown to every family, if only as frames."""
    found = ["completion", "vision", "video", "structured_output"]
    found += ["tools"] if loaded.host.tool_parser is not None else []
    found += ["thinking"] if loaded.host.reasoning_format is not None else []
    return tuple(found)


def _parameters(loaded: LoadedModel) -> Counter[str]:
    """How many the model has unquantized, by what they are stored as: `4bit`, `bfloat16`."""
    found = Counter[str]()
    for _, module in loaded.model.named_modules():
        bits = getattr(module, "bits", None) if "scales" in module else None
        for name, array in module.items():
            if not hasattr(array, "nbytes") or (bits and name in ("scales", "biases")):
                continue
            if bits and name == "weight":
                found[f"{bits}bit"] += array.size * _PACKED_BITS // bits
            else:
                found[str(array.dtype).removeprefix("mlx.core.")] += array.size
    return found


def _modified_at(folder: Path) -> float:
    files = [path for pattern in _FILES for path in visible_files(folder, pattern)]
    return max((path.stat().st_mtime for path in files), default=0.0)
