"""Corrections of Gemma 4."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_vlm.models.gemma4.language import Gemma4TextModel

from vlm_server.runner.backends.bounded_layer import BoundedLayer, MixedLayer
from vlm_server.runner.families.corrections import Settings, override
from vlm_server.runner.families.corrections.processors import read_settings


def correct(model: Any, _processor: Any, _settings: Settings) -> None:
    """Make no masks in compiled steps of several tokens, whose layers need none: mlx-vlm reads an
    offset for them, which only the device knows."""
    override(model.language_model.model, _make_masks=_make_masks)


def correct_unified(model: Any, processor: Any, settings: Settings) -> None:
    """The same, and the processor's settings. Inputs are embedded in compiled steps, too: mlx-vlm
    looks among the tokens for images there, for a flag of its own generation."""
    read_settings(model, processor, settings)
    correct(model, processor, settings)
    override(model, _update_chunked_prefill_mode=_forget_images)


def _forget_images(self: Any, *_: Any, **__: Any) -> None:
    self.no_chunked_prefill = self.language_model.no_chunked_prefill = False


def _make_masks(self: Any, h: mx.array, cache: list[Any], *further: Any) -> list[Any]:
    if cache and isinstance(cache[0], BoundedLayer | MixedLayer):
        return [None] * len(self.layers)
    masks: list[Any] = Gemma4TextModel._make_masks(self, h, cache, *further)
    return masks
