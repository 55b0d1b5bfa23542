"""Loading of a checkpoint: checks of its files, faster parts of the model, its `ModelSpec`."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx_vlm

from vlm_server.errors import ModelLoadError
from vlm_server.hub.layout import visible_files
from vlm_server.protocol import SamplingParams
from vlm_server.runner.backends import backend_of
from vlm_server.runner.backends.interface import Backend
from vlm_server.runner.device.arrays import DeviceErrors
from vlm_server.runner.device.device import Device
from vlm_server.runner.drafters.draft_head import DraftHead
from vlm_server.runner.families.family import Family
from vlm_server.runner.families.table import refuse_unservable, row_of
from vlm_server.runner.fingerprint import Checkpoint
from vlm_server.runner.loaded import LoadedModel, language_model_of
from vlm_server.runner.loading.adapters import check_applied, check_finite, read_adapters
from vlm_server.runner.loading.checkpoint.config import normalise, spelling_of
from vlm_server.runner.loading.checkpoint.files import (
    check_files,
    check_shards,
    image_settings,
    read_json,
    reason_of,
)
from vlm_server.runner.loading.checkpoint.task import with_task
from vlm_server.runner.loading.checkpoint.view import (
    no_code_of,
    text_model_of,
    view_of,
    weights_renamed,
)
from vlm_server.runner.loading.checkpoint.weights import Budget, check_fits, dtype_on, tensors_in
from vlm_server.runner.loading.drafter import find_drafter, head_class, open_drafter, or_none
from vlm_server.runner.loading.embedder import load_embedder, make_embedder_fast
from vlm_server.runner.loading.held_arrays import arrays_of
from vlm_server.runner.loading.model_spec import model_spec
from vlm_server.runner.loading.probe import probe
from vlm_server.runner.model.adapters import Adapter, attach
from vlm_server.runner.model.attention import ModelAttention, use_gated_delta
from vlm_server.runner.model.compiled_model import CompiledModel
from vlm_server.runner.model.deepstack import add_to_all_tokens
from vlm_server.runner.model.forward_pass import text_inputs
from vlm_server.runner.model.lm_head import has_last_token_head, use_last_token_head
from vlm_server.runner.model.mrope import (
    DecodePositions,
    forget_positions,
    keeps_positions,
    use_shared_mrope,
)
from vlm_server.runner.model.simplify import simplify
from vlm_server.runner.model.state_modules import can_forget, use_state_modules
from vlm_server.runner.model.text_model import TextModel
from vlm_server.runner.ranks import Ranks
from vlm_server.runner.vision.patches import use_fast_patches
from vlm_server.settings import ModelSettings

logger = logging.getLogger(__name__)

_PACKED_BITS = 32
"""Bits of the integers into which quantized weights are packed."""


def load(
    settings: ModelSettings,
    device: Device,
    limit_bytes: int,
    ranks: Ranks | None = None,
    adapters: Mapping[str, str] = MappingProxyType({}),
) -> LoadedModel:
    """The checkpoint in folder `settings.path`, or this rank's part of it.

    adapters: folders of LoRA adapters, by name. Runs no code from any and downloads nothing. Raises
    ModelLoadError if a folder is no checkpoint or adapter that can be served, or if the weights
    take more than `limit_bytes`.
    """
    folder, backend = Path(settings.path), backend_of(device)
    drafter = None if ranks is not None else find_drafter(settings.drafter, folder)
    checkpoint = Checkpoint(
        folder,
        str(settings.dtype),
        settings.chat_template,
        None if drafter is None else drafter.folder,
    )
    with open_lazily(settings, device, limit_bytes, ranks, adapters) as opened:
        config, family = opened.config, opened.family
        model, processor = opened.model, opened.processor
        parameters, free_bytes = _parameters(model), limit_bytes - opened.size_bytes
        positions = _make_fast(family, model, processor, backend, free_bytes)
        spec = model_spec(settings, config, family, model, processor)
        spec = replace(spec, adapters={each.name: each.digest for each in opened.adapters})
        if opened.adapters:
            attach(opened.adapters)
            check_applied(model.language_model, family, opened.adapters)
        whole = model if ranks is None or ranks.leads else model.language_model
        if opened.drafter is not None:
            backend.use_kernels_of_head(opened.drafter, free_bytes)
        mx.eval(arrays_of(whole), arrays_of(opened.drafter))
    generation = read_json(folder / "generation_config.json")
    language_model = language_model_of(model)
    attention = ModelAttention(language_model, backend.attention(spec.context_tokens))
    head, size_bytes = (
        _draft_head(settings, opened.drafter, language_model, attention),
        opened.size_bytes,
    )
    if opened.drafter is not None:
        forget_positions(language_model)
        if head is None:
            size_bytes -= opened.drafter_bytes
    text = _text_model(opened, device, attention, positions, keeps_hidden=head is not None)
    writes = family.tower is None and keeps_positions(language_model)  # while it encodes
    return LoadedModel(
        model=model,
        processor=processor,
        family=family,
        spec=spec,
        checkpoint=checkpoint,
        parameters=parameters,
        size_bytes=size_bytes,
        device=device,
        decode_positions=positions,
        attention=attention,
        text=text,
        default_sampling=_default_sampling(generation),
        position_lock=threading.Lock() if writes else nullcontext(),
        errors=DeviceErrors(are_late=backend.errors_are_late),
        ranks=ranks,
        draft_head=head,
    )


def _text_model(
    opened: OpenedModel,
    device: Device,
    attention: ModelAttention,
    positions: DecodePositions,
    *,
    keeps_hidden: bool,
) -> TextModel:
    """The language model, with compiled steps where the device and the family have them."""
    family, language_model = opened.family, language_model_of(opened.model)
    if not device.runs_our_kernels or not family.is_checked or family.embeds is not None:
        return TextModel(language_model, attention, keeps_hidden=keeps_hidden)
    backend = backend_of(device)
    embed = text_inputs(opened.model) if backend.mixed_step_tokens else None
    forget_positions(language_model)
    text = CompiledModel(
        language_model,
        attention,
        positions,
        backend.draft_widths,
        family.deepstack.arguments,
        embed,
        backend.mixed_step_tokens,
        backend.max_inner_points,
        has_adapters=bool(opened.adapters),
        keeps_hidden=keeps_hidden,
    )
    forget_positions(language_model)
    return text


def _draft_head(
    settings: ModelSettings, module: Any | None, language_model: Any, attention: ModelAttention
) -> DraftHead | None:
    """The drafter of a loaded model, if its drafts can be verified.

    Raises ModelLoadError if not, and the settings name it.
    """

    def new_head() -> DraftHead:
        if not (can_forget(language_model) and has_last_token_head(language_model)):
            raise ModelLoadError("no drafter fits this model: its layers or its head are unknown")
        try:
            return head_class(module)(module, language_model, attention.attention)
        except ModelLoadError:
            raise
        except Exception as error:  # of mlx-vlm's classes, whose configurations check little
            raise ModelLoadError(f"the drafter does not fit this model: {error}") from error

    return None if module is None else or_none(settings.drafter, new_head)


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A checkpoint whose weights are lazy, and the bytes that they, its adapters and its drafter
    will take."""

    config: dict[str, Any]
    family: Family
    model: Any
    processor: Any
    size_bytes: int
    adapters: tuple[Adapter, ...] = ()
    drafter: Any | None = None
    """mlx-vlm's module."""
    drafter_bytes: int = 0


@contextmanager
def open_lazily(
    settings: ModelSettings,
    device: Device,
    limit_bytes: int,
    ranks: Ranks | None = None,
    adapter_folders: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[OpenedModel]:
    """The checkpoint in folder `settings.path` with lazy weights. See `load`.

    They can be read in the `with` block only.
    """
    folder = Path(settings.path)
    check_files(folder)
    config = read_json(folder / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ModelLoadError(f"{folder}/config.json names no model_type")
    refuse_unservable(config, allow_unchecked=settings.allow_unchecked)
    config = with_task(config, {path.name for path in visible_files(folder)}, settings.task)
    row, prefixes = row_of(config), spelling_of(config).weight_prefixes
    config = normalise(config)
    if ranks is not None and row is not None and row.embeds is not None:
        raise ModelLoadError(f"{row.name} makes vectors: such a model is not split over machines")
    dtype, budget = dtype_on(device, settings.dtype), Budget(limit_bytes, device)
    tensors = tensors_in(folder)
    if ranks is None:
        check_fits(tensors, dtype, budget)
    with view_of(folder, as_processors(config, row)) as view:
        spelling = weights_renamed(config, prefixes)
        with no_code_of(folder), no_code_of(view), spelling, text_model_of(config):
            model, processor = _load(folder, view, config, row)
        if row is not None and row.part:
            model, config = getattr(model, row.part), config.get(f"{row.part}_config", {}) | config
        family = row or probe(str(config["model_type"]), model, processor)
        for warning in family.warnings:
            logger.warning("%s", warning)
        if dtype != "auto":
            model.set_dtype(getattr(mx, dtype))
        if ranks is not None:
            ranks.shard(model, family.name, is_shardable=family.is_shardable)
        adapters = read_adapters(adapter_folders, family, model)
        _correct(family, model, processor, folder)
        further = [array for adapter in adapters for array in adapter.arrays]
        size_bytes = _bytes_of(model) + sum(array.nbytes for array in further)
        check_fits(tensors, dtype, budget, size_bytes)

        def fitting_drafter() -> Any | None:
            drafter = open_drafter(settings, family, model, is_split=ranks is not None)
            if drafter is not None:
                if dtype != "auto":
                    drafter.set_dtype(getattr(mx, dtype))
                check_fits(tensors, dtype, budget, size_bytes + _bytes_of(drafter))
            return drafter

        drafter = or_none(settings.drafter, fitting_drafter)
        drafter_bytes = _bytes_of(drafter)
        size_bytes += drafter_bytes
        check_finite(adapters)
        yield OpenedModel(
            config, family, model, processor, size_bytes, adapters, drafter, drafter_bytes
        )


def _bytes_of(module: Any) -> int:
    return sum(array.nbytes for array in arrays_of(module))


def as_processors(config: dict[str, Any], row: Family | None) -> dict[str, Any]:
    """`config` as the checkpoint's processor is found by it."""
    if row is None or row.embeds is None or not row.embeds.processor:
        return config
    return config | {"model_type": row.embeds.processor}


def _load(folder: Path, view: Path, config: dict[str, Any], row: Family | None) -> tuple[Any, Any]:
    """mlx-vlm's model and processor of `folder`, seen through `view`; the weights are lazy."""
    try:
        if row is not None and row.embeds is not None:
            model, processor = load_embedder(view, config)
        else:
            model, processor = mlx_vlm.load(str(view), lazy=True, trust_remote_code=False)
    except Exception as error:
        logger.debug("loading failed", exc_info=True)
        check_shards(folder)
        reason = reason_of(error).replace(str(view), str(folder))
        raise ModelLoadError(f"mlx-vlm can't load this checkpoint: {reason}") from error
    return model, processor


def _correct(family: Family, model: Any, processor: Any, folder: Path) -> None:
    """Correct mlx-vlm's model and processor, where they would fail or be wrong."""
    if family.fix is None:
        return
    try:
        family.fix(model, processor, image_settings(folder))
    except AttributeError as error:  # transformers may have found a processor of another kind
        raise ModelLoadError(f"the checkpoint's processor is not its family's: {error}") from error


def _make_fast(
    family: Family, model: Any, processor: Any, backend: Backend, free_bytes: int
) -> DecodePositions:
    """Replace parts of the model and its processor that are slow."""
    if family.tower is not None:
        model.vision_tower = family.tower(model.vision_tower, backend)
        use_fast_patches(processor, model.vision_tower)
    if family.embeds is not None:
        return make_embedder_fast(family, model)
    simplify(model.language_model)
    rotate = backend.use_kernels(model, free_bytes)
    use_last_token_head(model.language_model)
    add_to_all_tokens(model.language_model)
    use_gated_delta(backend)
    use_state_modules(model.language_model)
    if family.mrope is None:
        return DecodePositions.NONE
    return use_shared_mrope(model.language_model, rotate)


def _parameters(model: Any) -> Counter[str]:
    """Number of parameters, as before quantization, by their storage: `4bit`, `bfloat16`."""
    counts = Counter[str]()
    for _, module in model.named_modules():
        bits = getattr(module, "bits", None) if "scales" in module else None
        for name, array in module.items():
            if not hasattr(array, "nbytes") or (bits and name in ("scales", "biases")):
                continue
            if bits and name == "weight":
                counts[f"{bits}bit"] += array.size * _PACKED_BITS // bits
            else:
                counts[str(array.dtype).removeprefix("mlx.core.")] += array.size
    return counts


def _default_sampling(generation: dict[str, Any]) -> SamplingParams:
    """The checkpoint's own sampling; greedy if it says so."""

    def number(name: str, default: float) -> float:
        value = generation.get(name)
        return default if value is None else float(value)

    is_greedy = generation.get("do_sample") is False
    return SamplingParams(
        temperature=0.0 if is_greedy else number("temperature", 1.0),
        top_p=number("top_p", 1.0) or 1.0,
        top_k=max(int(number("top_k", 0)), 0),
        min_p=number("min_p", 0.0),
        repetition_penalty=number("repetition_penalty", 1.0) or 1.0,
    )
