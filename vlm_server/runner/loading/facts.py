"""What is known of a checkpoint: before it is loaded (`Survey`), and after (`ModelFacts`).

The survey follows the rules of loading, and reads no weights.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from mlx_vlm.utils import get_model_and_args

from vlm_server.errors import ModelLoadError
from vlm_server.hub import layout
from vlm_server.hub.messages import DownloadPlan
from vlm_server.hub.survey import Survey, SurveyRequest
from vlm_server.protocol import ModelFacts
from vlm_server.runner.device.device import current_device
from vlm_server.runner.families import FAMILIES, refuse_unservable
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.loading.checkpoint.config import as_read
from vlm_server.runner.loading.checkpoint.weights import (
    Budget,
    bytes_as,
    check_tensors_fit,
    dtype_on,
)
from vlm_server.runner.loading.evaluate import arrays_of
from vlm_server.runner.loading.load import open_lazily
from vlm_server.runner.loading.model_spec import context_tokens_of, image_token_of
from vlm_server.runner.loading.probe import planned_state_size
from vlm_server.runner.memory import limit_bytes
from vlm_server.settings import Model

_MIB = 1 << 20
_STORED = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}
"""Types of safetensors, and their bytes, by their names in configurations."""
_PACKED_BITS = 32
"""Bits of the integers into which quantized weights are packed."""
_FILES = ("*.safetensors", "config.json")

# ---- before loading ----------------------------------------------------------------------


def survey(request: SurveyRequest, least_tokens: int = 1) -> Survey:
    """What the checkpoint is, and whether it fits with a request of `least_tokens`.

    Never raises for a fault of the checkpoint: see `Survey.refusal`.
    """
    device = current_device()
    found = Survey(
        device=device.name,
        memory_bytes=device.memory_bytes,
        limit_bytes=limit_bytes(request.memory, device),
    )
    try:
        if request.plan is not None:
            found = _with_config(found, request.plan.config)
            found = _with_context(found, request.plan.config, request.model)
            return _with_plan(found, request.plan, request.model)
        config = layout.read_object(Path(request.model.path) / layout.CONFIG)
        found = _with_config(found, config)
        found = _with_context(found, config, request.model)
        return _with_room(_with_weights(found, request, least_tokens), least_tokens)
    except ModelLoadError as error:
        return msgspec.structs.replace(found, refusal=str(error))


def _with_room(found: Survey, least_tokens: int) -> Survey:
    """`found`, refused if the model leaves no room for a short request, as after loading."""
    least = min(least_tokens, found.context_tokens)
    if found.fitting_tokens is None or found.fitting_tokens >= least:
        return found
    free = (found.limit_bytes - found.weight_bytes) / _MIB
    reason = (
        f"the model leaves no room for requests: beside its weights {free:.0f} MiB of "
        f"memory.limit_bytes are left, enough for {found.fitting_tokens} tokens, and {least} are "
        "needed: raise that, or serve a smaller or a quantized checkpoint"
    )
    return msgspec.structs.replace(found, refusal=reason)


def _with_config(found: Survey, config: Mapping[str, Any]) -> Survey:
    row = FAMILIES.get(layout.family(config))
    return msgspec.structs.replace(
        found,
        family=row.name if row else layout.family(config),
        is_checked=row is not None and row.is_checked,
        quantization=layout.quantization(config),
    )


def _with_context(found: Survey, config: Mapping[str, Any], model: Model) -> Survey:
    """Raises ModelLoadError for a configuration that mlx-vlm can't read."""
    row = FAMILIES.get(layout.family(config))
    whole = as_read(dict(config))
    part = whole.get(f"{row.part}_config") if row and row.part else None
    context = context_tokens_of(part or whole, model.max_context_tokens)
    return msgspec.structs.replace(found, context_tokens=context)


def _with_plan(found: Survey, plan: DownloadPlan, model: Model) -> Survey:
    """Raises ModelLoadError if the plan alone shows that the model can't be served."""
    config = dict(plan.config)
    if not found.family:
        raise ModelLoadError("its config.json names no model_type")
    refuse_unservable(config, allow_unchecked=True)
    try:
        get_model_and_args(config=config)
    except Exception as error:  # noqa: BLE001  families fail in their own ways
        raise ModelLoadError(f"mlx-vlm has no family {found.family!r} ({error})") from None
    if not layout.sees(config):
        raise ModelLoadError(f"{found.family} names no image token: not a vision model")
    refuse_unservable(config, allow_unchecked=model.allow_unchecked)
    device = current_device()
    dtype = dtype_on(device, model.dtype)
    tensors = plan.parameters or _tensors(found.quantization, plan.weight_bytes)
    check_tensors_fit(tensors.items(), dtype, Budget(found.limit_bytes, device))
    return msgspec.structs.replace(found, weight_bytes=bytes_as(dtype, tensors.items()))


def _tensors(stored: str, num_bytes: int) -> dict[str, int]:
    """Number of weights by type in files of `num_bytes`; bytes if they are quantized."""
    kind, size = _STORED.get(stored, ("U8", 1))
    return {kind: num_bytes // size}


def _with_weights(found: Survey, request: SurveyRequest, least_tokens: int) -> Survey:
    """Raises ModelLoadError as loading would, as far as unread weights can tell."""
    with open_lazily(request.model, current_device(), found.limit_bytes) as opened:
        image_token_of(opened.family, opened.model, opened.config)
        state = planned_state_size(opened.model.language_model, opened.family)
    free = found.limit_bytes - opened.size_bytes
    counts = range(1, found.context_tokens + 1)
    fitting = bisect_right(counts, free, key=state.of)
    return msgspec.structs.replace(
        found,
        weight_bytes=opened.size_bytes,
        fitting_tokens=fitting,
        kv_bytes=state.of(fitting),
        least_kv_bytes=state.of(min(least_tokens, found.context_tokens)),
    )


# ---- after loading -----------------------------------------------------------------------


def model_facts(loaded: LoadedModel, folder: Path) -> ModelFacts:
    """The facts that clients get of the model loaded from `folder`."""
    parameters = _parameters(loaded)
    rule = loaded.spec.pixel_rule
    quantization = max(parameters, key=parameters.__getitem__, default="")
    return ModelFacts(
        family=loaded.family.name,
        num_parameters=parameters.total(),
        size_bytes=sum(array.nbytes for array in arrays_of(loaded.model)),
        quantization=quantization,
        digest=loaded.checkpoint.digest(),
        modified_at=_modified_at(folder),
        capabilities=_capabilities(loaded),
        context_tokens=loaded.spec.context_tokens,
        min_image_pixels=rule.min_pixels if rule else 0,
        max_image_pixels=rule.max_pixels if rule else 0,
        image_side_multiple=rule.factor if rule else 0,
        coordinates=loaded.family.coordinates,
        warnings=(*loaded.family.warnings, *loaded.spec.warnings),
    )


def _parameters(loaded: LoadedModel) -> Counter[str]:
    """Number of parameters, as before quantization, by their storage: `4bit`, `bfloat16`."""
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
    files = [path for pattern in _FILES for path in layout.visible_files(folder, pattern)]
    return max((path.stat().st_mtime for path in files), default=0.0)


def _capabilities(loaded: LoadedModel) -> tuple[str, ...]:
    """Every family gets videos, if only as frames."""
    found = ["completion", "vision", "video", "structured_output"]
    found += ["tools"] if loaded.spec.tool_parser is not None else []
    found += ["thinking"] if loaded.spec.reasoning_format is not None else []
    return tuple(found)
