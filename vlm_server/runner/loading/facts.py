"""Facts of a checkpoint: before it is loaded (`Examination`), and after (`ModelFacts`).

The examination follows the rules of loading, and reads no weights.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from vlm_server.cache.kv_storage import EXACT, KVStorage
from vlm_server.errors import ModelLoadError
from vlm_server.hub import layout
from vlm_server.hub.examination import Examination, ExaminationRequest
from vlm_server.hub.messages import DownloadPlan
from vlm_server.protocol import ModelFacts
from vlm_server.runner.device.device import current_device
from vlm_server.runner.drafters.draft_head import kind_of
from vlm_server.runner.families.table import refuse_unservable, row_of
from vlm_server.runner.kv.layers import can_store
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.loading.checkpoint.config import normalise
from vlm_server.runner.loading.checkpoint.task import with_task
from vlm_server.runner.loading.checkpoint.weights import Budget, bytes_as, check_fits, dtype_on
from vlm_server.runner.loading.load import open_lazily
from vlm_server.runner.loading.model_spec import context_tokens_of, image_token_of
from vlm_server.runner.loading.probe import planned_state_size
from vlm_server.runner.memory import limit_bytes
from vlm_server.settings import CacheSettings, MemorySettings, ModelSettings
from vlm_server.sizes import memory_size

_STORED = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}
"""Types of safetensors, and their bytes, by their names in configurations; else bytes."""
_FILES = ("*.safetensors", "config.json")

# ---- before loading ----------------------------------------------------------------------


def examine(request: ExaminationRequest, least_tokens: int = 1) -> Examination:
    """The checkpoint's properties, and whether it fits with a request of `least_tokens`.

    Never raises for a fault of the checkpoint: see `Examination.refusal`.
    """
    device, plan, model = current_device(), request.plan, request.model
    limit = limit_bytes(request.memory, device)
    config = plan.config if plan else layout.read_object(Path(model.path) / layout.CONFIG)
    config, refusal = _with_task(config, request)
    row = row_of(config)
    examination = Examination(
        refusal=refusal,
        makes_vectors=row is not None and row.embeds is not None,
        family=row.name if row else layout.family(config),
        is_checked=row is not None and row.is_checked,
        quantization=layout.quantization(config),
        device=device.name,
        memory_bytes=device.memory_bytes,
        limit_bytes=limit,
    )
    if refusal:
        return examination
    try:
        whole = normalise(dict(config))
        part = whole.get(f"{row.part}_config") if row and row.part else None
        context = context_tokens_of(part or whole, model.max_context_tokens, row)
        examination = msgspec.structs.replace(examination, context_tokens=context)
        if plan is None:
            return _with_weights(examination, request, least_tokens)
        weight_bytes = _planned_bytes(examination, plan, model, Budget(limit, device))
        return msgspec.structs.replace(examination, weight_bytes=weight_bytes)
    except ModelLoadError as error:
        return msgspec.structs.replace(examination, refusal=str(error))


def _with_task(
    config: Mapping[str, Any], request: ExaminationRequest
) -> tuple[dict[str, Any], str]:
    """`config` as `with_task` has it, or the reason why it has not."""
    plan, folder = request.plan, Path(request.model.path)
    names: Iterable[str] = (path.name for path in layout.visible_files(folder))
    if plan is not None:
        names = (part for file in plan.files for part in Path(file).parts)
    try:
        return with_task(dict(config), set(names), request.model.task), ""
    except ModelLoadError as error:
        return dict(config), str(error)


def _planned_bytes(
    examination: Examination, plan: DownloadPlan, model: ModelSettings, budget: Budget
) -> int:
    """Bytes of the weights; raises ModelLoadError if `plan` shows that they can't be served."""
    config = _with_task(plan.config, ExaminationRequest(model, MemorySettings(), plan))[0]
    if not examination.family:
        raise ModelLoadError("its config.json names no model_type")
    refuse_unservable(config, allow_unchecked=model.allow_unchecked)
    kind, size = _STORED.get(examination.quantization, ("U8", 1))
    tensors = plan.parameters or {kind: plan.weight_bytes // size}
    dtype = dtype_on(budget.device, model.dtype)
    check_fits(tensors, dtype, budget)
    return bytes_as(dtype, tensors)


def _with_weights(
    examination: Examination, request: ExaminationRequest, least_tokens: int
) -> Examination:
    """`examination`, refused if no room is left for a short request, as after loading.

    Raises ModelLoadError as loading would, as far as unread weights can tell.
    """
    device, limit_bytes = current_device(), examination.limit_bytes
    opening = open_lazily(request.model, device, limit_bytes, adapter_folders=request.adapters)
    with opening as opened:
        if opened.family.reads_images:
            tokenizer = getattr(opened.processor, "tokenizer", opened.processor)
            image_token_of(opened.family, opened.model, opened.config, tokenizer)
        if opened.family.embeds is not None:
            return msgspec.structs.replace(examination, weight_bytes=opened.size_bytes)
        language_model = opened.model.language_model
        storage = _storage_of_running(request.cache) if can_store(language_model) else EXACT
        state = planned_state_size(language_model, opened.drafter, storage)
    free_bytes = limit_bytes - opened.size_bytes
    fitting = bisect_right(
        range(1, examination.context_tokens + 1), free_bytes, key=state.bytes_for
    )
    min_tokens, refusal = min(least_tokens, examination.context_tokens), ""
    if fitting < min_tokens:
        refusal = (
            f"the model leaves no room for requests: beside its weights {memory_size(free_bytes)} "
            f"of memory.max_bytes are left, enough for {fitting} tokens, and {min_tokens} are "
            "needed: raise that, or serve a smaller or a quantized checkpoint"
        )
    return msgspec.structs.replace(
        examination,
        weight_bytes=opened.size_bytes,
        fitting_tokens=fitting,
        kv_bytes=state.bytes_for(fitting),
        least_kv_bytes=state.bytes_for(min_tokens),
        refusal=refusal,
        drafter=kind_of(opened.drafter) if opened.drafter else "",
    )


def _storage_of_running(settings: CacheSettings) -> KVStorage:
    """How running sequences hold KV at worst: what `auto` means is known after loading."""
    if settings.kv_bits == "auto":
        return EXACT
    of_running = settings.quantize_running
    return KVStorage(settings.kv_bits, settings.kv_group_size, of_running).running


# ---- after loading -----------------------------------------------------------------------


def model_facts(loaded: LoadedModel, folder: Path) -> ModelFacts:
    """The facts that clients get of the model loaded from `folder`."""
    parameters = loaded.parameters
    rule = loaded.spec.pixel_rule
    quantization = max(parameters, key=parameters.__getitem__, default="")
    return ModelFacts(
        family=loaded.family.name,
        num_parameters=parameters.total(),
        size_bytes=loaded.size_bytes,
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
        vector_dimensions=loaded.spec.vectors.dimensions if loaded.spec.vectors else 0,
        drafter=loaded.draft_head.name if loaded.draft_head else "",
    )


def _modified_at(folder: Path) -> float:
    files = [path for pattern in _FILES for path in layout.visible_files(folder, pattern)]
    return max((path.stat().st_mtime for path in files), default=0.0)


def _capabilities(loaded: LoadedModel) -> tuple[str, ...]:
    """The kinds of input and output; all that read images get videos, if only as frames."""
    vectors = loaded.spec.vectors
    capabilities = ["completion", "structured_output"] if loaded.spec.writes else []
    capabilities += ["embedding"] if vectors else []
    capabilities += ["rerank"] if vectors or loaded.spec.scores else []
    capabilities += ["multi_vector"] if vectors and vectors.is_multi else []
    capabilities += ["vision", "video"] if loaded.spec.reads_images else []
    parser = loaded.spec.tool_parser
    capabilities += ["tools"] if parser is not None and not parser.needs_instruction else []
    capabilities += ["thinking"] if loaded.spec.reasoning_format is not None else []
    return tuple(capabilities)
