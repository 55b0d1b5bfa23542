"""Finds and loads a trained drafter: a head within a checkpoint, beside it, or in a folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
from mlx_vlm.speculative.drafters.mtp_split import MTPSplitter, get_mtp_splitter
from mlx_vlm.utils import (
    get_model_and_args,
    get_model_type,
    load_model,
    load_model_weights,
)

from vlm_server.cache.kv_storage import EXACT, KVStorage
from vlm_server.errors import ModelLoadError
from vlm_server.hub.layout import CONFIG, read_object
from vlm_server.runner.drafters.assistant_head import AssistantHead
from vlm_server.runner.drafters.block_head import BlockHead
from vlm_server.runner.drafters.draft_head import EAGLE, DraftHead, EagleHead, MtpHead, kind_of
from vlm_server.runner.families.family import Family
from vlm_server.runner.kv.layers import empty_layer
from vlm_server.runner.loaded import language_model_of
from vlm_server.runner.loading.checkpoint.files import reason_of
from vlm_server.runner.loading.checkpoint.view import no_code_of
from vlm_server.runner.model.lm_head import embedding_shape
from vlm_server.settings import AUTO, OFF, ModelSettings

logger = logging.getLogger(__name__)

Drafter = TypeVar("Drafter")

_CLASSES: dict[str, type[DraftHead]] = {
    "qwen3_5_mtp": MtpHead,
    "nemotron_h_mtp": MtpHead,
    EAGLE: EagleHead,
    "gemma4_assistant": AssistantHead,
    "gemma4_unified_assistant": AssistantHead,
    "qwen3_dflash": BlockHead,
    "gemma4_dflash": BlockHead,
    "dflash2": BlockHead,
    "dspark": BlockHead,
    "qwen3_dspark": BlockHead,
    "gemma4_dspark": BlockHead,
}
KINDS = tuple(_CLASSES)
"""mlx-vlm's names of the kinds of drafters that are served."""
_FOLDERS = ("mtp", EAGLE, "assistant", "dflash")
"""Names of folders within a checkpoint, and what those beside it have after its name."""
_BASES = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}
"""Names by which mlx-vlm finds the heads of text models."""


@dataclass(frozen=True, slots=True)
class DrafterFiles:
    """A drafter in `folder`; `splitter` takes it out of a whole checkpoint, if that is one."""

    folder: Path
    splitter: MTPSplitter | None = None

    def load(self) -> Any:
        """mlx-vlm's module, whose weights may be lazy. Raises any exception."""
        if self.splitter is None:
            return load_model(self.folder, lazy=True)
        config, weights = self.splitter.prepare(self.folder)
        package, _ = get_model_and_args(config)
        module = package.Model(package.ModelConfig.from_dict(config))
        return load_model_weights(module, config, weights, self.folder, lazy=True)


def find_drafter(setting: str, folder: Path) -> DrafterFiles | None:
    """The drafter for the checkpoint in `folder`; `setting` is `model.drafter`.

    Raises ModelLoadError if the setting names a folder without one.
    """
    if setting == OFF:
        return None
    if setting == AUTO:
        within = [folder, *(folder / name for name in _FOLDERS)]
        beside = [folder.parent / f"{folder.name}-{name}" for name in _FOLDERS]
        return next(filter(None, map(_drafter_in, [*within, *beside])), None)
    found = _drafter_in(Path(setting))
    if found is None:
        name = _kind_of(read_object(Path(setting) / CONFIG)) or "no model_type"
        raise ModelLoadError(
            f"{setting} is no drafter that can be served (model.drafter): its config.json names "
            f"{name}, and those served are {', '.join(KINDS)}, or checkpoints with such a head"
        )
    return found


def _kind_of(config: Mapping[str, Any]) -> str:
    """mlx-vlm's name of the kind of model or drafter; empty without one."""
    try:
        return get_model_type(dict(config)) or ""
    except (ArithmeticError, AttributeError, TypeError, ValueError):  # of values that are no names
        return ""


def _drafter_in(folder: Path) -> DrafterFiles | None:
    config = read_object(folder / CONFIG)
    if _kind_of(config) in KINDS:
        return DrafterFiles(folder)
    try:
        base = _BASES.get(str(config.get("model_type")))
        splitter = get_mtp_splitter(base, source_config=config) if config else None
        if splitter is None or splitter.output_model_type not in KINDS:
            return None
        names = splitter.iter_selected(folder, splitter.read_text_config(config))
        return DrafterFiles(folder, splitter) if next(iter(names), None) else None
    except Exception:  # of damaged files, which loading reports
        logger.debug("no drafter is found in %s", folder, exc_info=True)
        return None


def head_class(module: Any) -> type[DraftHead]:
    """The class that runs mlx-vlm's `module` of a drafter."""
    return _CLASSES[kind_of(module)]


def or_none(setting: str, load: Callable[[], Drafter]) -> Drafter | None:
    """The result of `load`; None, with a warning, for a drafter that `setting` does not name and
    that does not load."""
    try:
        return load()
    except ModelLoadError as error:
        if setting != AUTO:
            raise
        logger.warning("a drafter was found and is not used: %s", error)
        return None


def open_drafter(
    settings: ModelSettings, family: Family, model: Any, *, is_split: bool
) -> Any | None:
    """mlx-vlm's module of the drafter of `model`, whose weights may be lazy; None without one.

    is_split: whether the model is split over machines. Raises ModelLoadError if the settings name a
    drafter that can't be served or does not fit.
    """
    files = find_drafter(settings.drafter, Path(settings.path))
    if files is None:
        return None
    if is_split:
        if settings.drafter != AUTO:
            raise ModelLoadError("a model that is split over machines has no drafter: leave it out")
        return None
    return or_none(settings.drafter, partial(_open, files, family, model))


def _open(files: DrafterFiles, family: Family, model: Any) -> Any:
    if not family.is_checked or family.embeds is not None:
        raise ModelLoadError(f"no drafts are verified for {family.name}, so it can have no drafter")
    try:
        with no_code_of(files.folder):
            module = files.load()
    except Exception as error:
        raise ModelLoadError(
            f"mlx-vlm can't load the drafter in {files.folder}: {reason_of(error)}"
        ) from error
    _check_fits(module, language_model_of(model), files.folder)
    return module


def _check_fits(module: Any, language_model: Any, folder: Path) -> None:
    """Raises ModelLoadError if the drafter is one of another model."""
    config = read_object(folder / CONFIG)
    if (config.get("text_config") or config).get("mtp_use_dedicated_embeddings"):
        raise ModelLoadError(f"the drafter in {folder} has embeddings of its own: not supported")
    vocabulary, hidden_size = embedding_shape(language_model)
    sizes = head_class(module).sizes(module)
    for name, own, wanted in (
        ("hidden_size", sizes[0], hidden_size),
        ("vocab_size", sizes[1], vocabulary),
    ):
        if own != wanted:
            raise ModelLoadError(
                f"the drafter in {folder} is one of another model: its {name} is {own}, and the "
                f"model's {wanted}"
            )
    try:
        layers_of(module, language_model, mx.zeros((1, 2), mx.int32), EXACT)
    except Exception as error:  # of mlx-vlm's classes, whose configurations check little
        raise ModelLoadError(f"the drafter in {folder} does not fit the model: {error}") from error


def layers_of(
    module: Any, language_model: Any, token_ids: mx.array, storage: KVStorage
) -> list[Any]:
    """The layers of a drafter's module after these tokens, (1, tokens), none of it computed."""
    layers = [empty_layer(None, storage) for _ in module.make_cache()]
    head_class(module).append_lazily(module, language_model, token_ids, layers)
    return layers
