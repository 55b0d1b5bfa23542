"""The config.json of a checkpoint, with the names that mlx-vlm's classes read.

transformers 5 writes other names than transformers 4. For missing names mlx-vlm uses defaults, and
the model would have wrong rotary embeddings. Token ids have two names, of which each class reads
one.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Mapping
from typing import Any

from mlx_vlm.utils import get_model_and_args

from vlm_server.errors import ModelLoadError
from vlm_server.runner.families.family import Spelling
from vlm_server.runner.families.table import row_of, with_module

logger = logging.getLogger(__name__)

Json = dict[str, Any]
_PAIRS = (("image_token_id", "image_token_index"), ("video_token_id", "video_token_index"))
_SAME = (*_PAIRS, *((other, name) for name, other in _PAIRS))
"""Names of numbers, each with its alternative name."""
_NOT_SCALING = ("rope_theta", "partial_rotary_factor")
_BOOLEANS = ("attn_temperature_tuning",)
"""Names that transformers 5 reads as booleans alone: checkpoints of Llama 4 have a number."""
_OWNERS = {"text": "TextConfig", "llm": "TextConfig", "vision": "VisionConfig"}
"""mlx-vlm's classes for parts of a configuration."""
_UNSCALED = ("default", "axial")
"""Kinds of rope with no parameters but a base, and perhaps `mrope_section`."""


def normalise(config: Json) -> Json:
    """A copy of `config` (config.json) that mlx-vlm reads as transformers does.

    Raises ModelLoadError for a model that mlx-vlm can't run.
    """
    spelling = spelling_of(config)
    config = copy.deepcopy(config)
    vision = config.get("vision_config")
    if spelling.vision_type and isinstance(vision, dict):
        vision["model_type"] = spelling.vision_type
    for name, other in _SAME:
        if config.get(name) is None and config.get(other) is not None:
            config[name] = config[other]
    if spelling.has_flat_config and isinstance(config.get("text_config"), dict):
        config = config["text_config"] | config
        del config["text_config"]
    module = _module_of(config)
    if module is None:
        return config
    whole = _fields(module, "ModelConfig") | _fields(module, "TextConfig")
    _Part(config, whole).read()
    parts = [part for part in config.values() if isinstance(part, dict) and "text_config" in part]
    for holder in (config, *parts):
        for name, owner in _OWNERS.items():
            if isinstance(part := holder.get(f"{name}_config"), dict):
                _Part(part, _fields(module, owner)).read()
    return config


def spelling_of(config: Json) -> Spelling:
    row = row_of(config)
    return row.spelling if row else Spelling()


def _module_of(config: Json) -> Any:
    """mlx-vlm's module of the family; None if there is none, which loading reports."""
    try:
        return get_model_and_args(with_module(config))[0]
    except Exception:  # noqa: BLE001 - an import may raise anything
        return None


def _fields(module: Any, name: str) -> frozenset[str]:
    """The names that mlx-vlm's class for a part of the configuration reads."""
    owner = getattr(module, name, None)
    return frozenset(inspect.signature(owner).parameters) if owner else frozenset()


class _Part:
    """A table of the configuration, and the names that mlx-vlm reads from it."""

    def __init__(self, table: Json, fields: frozenset[str]) -> None:
        self._table = table
        self._fields = fields

    def read(self) -> None:
        self._read_rope()
        self._drop_dynamic_scaling()
        self._read_window_pattern()
        self._read_layer_overrides()
        for name in _BOOLEANS:
            if name in self._table:
                self._table[name] = bool(self._table[name])
        if self._table.get("num_experts") is None:
            self._set("num_experts", self._table.get("num_local_experts"))

    def _set(self, name: str, value: Any) -> None:
        if value is not None and name in self._fields:
            self._table[name] = value

    def _read_rope(self) -> None:
        rope = self._table.get("rope_parameters")
        if not isinstance(rope, dict):
            return
        if "rope_parameters" in self._fields:
            for name in _NOT_SCALING:  # some classes want these twice
                if self._table.get(name) is None:
                    self._set(name, rope.get(name))
            return
        del self._table["rope_parameters"]
        if isinstance(whole := rope.get("full_attention"), dict):
            windowed = rope.get("sliding_attention") or {}
            self._set("rope_local_base_freq", windowed.get("rope_theta"))
            self._set("rope_global_base_freq", whole.get("rope_theta"))
            rope = whole
        for name in _NOT_SCALING:
            self._set(name, rope.get(name))
        self._set_scaling({key: rope[key] for key in rope if key not in _NOT_SCALING})

    def _set_scaling(self, scaling: Json) -> None:
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind in _UNSCALED and "mrope_section" not in scaling:
            return
        self._set("rope_scaling", {"type": kind} | scaling)
        if "rope_scaling" not in self._fields and kind not in _UNSCALED:
            logger.warning("mlx-vlm ignores that this model's rope is scaled (%s)", kind)

    def _drop_dynamic_scaling(self) -> None:
        """Dynamic scaling begins beyond `max_position_embeddings`, and so does not apply here."""
        scaling = self._table.get("rope_scaling")
        if not isinstance(scaling, dict) or "alpha" in scaling:  # alpha: Hunyuan's, always applied
            return
        if (scaling.get("rope_type") or scaling.get("type")) == "dynamic":
            self._table["rope_scaling"] = None

    def _read_window_pattern(self) -> None:
        """Set the interval of layers without a window, for families that ignore `layer_types`."""
        kinds = self._table.get("layer_types")
        name = "sliding_window_pattern"
        is_known = isinstance(self._table.get(name), int | str) or "layer_types" in self._fields
        if is_known or name not in self._fields or not isinstance(kinds, list):
            return
        if "full_attention" not in kinds:
            return
        every = kinds.index("full_attention") + 1
        if any((kind == "full_attention") != (n % every == 0) for n, kind in enumerate(kinds, 1)):
            raise ModelLoadError("config.json: mlx-vlm can't run `layer_types` in such an order")
        self._set(name, every)

    def _read_layer_overrides(self) -> None:
        """Set the sizes of gemma4's layers without a window."""
        overrides = self._table.get("per_layer_config")
        if "per_layer_config" in self._fields:
            return
        if not isinstance(overrides, Mapping) or not overrides:
            return
        first, *others = overrides.values()
        kinds = self._table.get("layer_types") or []
        whole = {str(n) for n, kind in enumerate(kinds) if kind == "full_attention"}
        if any(layer != first for layer in others) or whole != set(map(str, overrides)):
            raise ModelLoadError("config.json: mlx-vlm can't run such a `per_layer_config`")
        for name, ours in (
            ("head_dim", "global_head_dim"),
            ("num_key_value_heads", "num_global_key_value_heads"),
        ):
            if self._table.get(ours) is None:
                self._set(ours, first.get(name))
