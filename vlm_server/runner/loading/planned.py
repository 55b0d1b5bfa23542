"""What a sequence of a model takes, before the model has computed anything."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import make_prompt_cache

from vlm_server.runner.families import Family
from vlm_server.runner.kv.segments import StateSize

_PROBE_TOKENS = 2


def planned_state_size(language_model: Any, family: Family) -> StateSize:
    """From a step that is planned but never computed. No other may be under way."""
    layers = make_prompt_cache(language_model)
    language_model(mx.zeros((1, _PROBE_TOKENS), dtype=mx.int32), cache=layers)
    family.forget_positions(language_model)
    return StateSize(layers, _PROBE_TOKENS)
