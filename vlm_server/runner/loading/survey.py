"""Says what a checkpoint is and what it needs here, by the rules of loading; reads no weights."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from mlx_vlm.utils import get_model_and_args

from vlm_server.errors import ModelLoadError
from vlm_server.hub import layout
from vlm_server.hub.messages import Plan
from vlm_server.hub.survey import Survey, SurveyRequest
from vlm_server.runner.device.device import current_device
from vlm_server.runner.device.memory import limit_bytes
from vlm_server.runner.families import FAMILIES, refuse_unservable
from vlm_server.runner.loading.checkpoint.config import as_read
from vlm_server.runner.loading.checkpoint.weights import (
    Budget,
    bytes_as,
    check_tensors_fit,
    dtype_on,
)
from vlm_server.runner.loading.host import context_tokens_of, image_token_of
from vlm_server.runner.loading.load import open_lazily
from vlm_server.runner.loading.planned import planned_state_size
from vlm_server.settings import Model

_STORED = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}
"""Types of safetensors, and their bytes, by their names in configurations."""


def survey(request: SurveyRequest, least_tokens: int = 1) -> Survey:
    """Never raises for what is wrong with the checkpoint: see `Survey.refusal`.

    There must be room for a request of `least_tokens`.
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
        return _with_weights(found, request, least_tokens)
    except ModelLoadError as error:
        return msgspec.structs.replace(found, refusal=str(error))


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


def _with_plan(found: Survey, plan: Plan, model: Model) -> Survey:
    """Raises ModelLoadError if it can be told already that it can't be served."""
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
    """How many numbers of which type files of `num_bytes` hold; bytes if they are quantized."""
    kind, size = _STORED.get(stored, ("U8", 1))
    return {kind: num_bytes // size}


def _with_weights(found: Survey, request: SurveyRequest, least_tokens: int) -> Survey:
    """Raises ModelLoadError as loading would, for what weights that were not read can tell."""
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
