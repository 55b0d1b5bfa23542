"""A backend's gated delta rule in the place of mlx-vlm's, which off Metal is a loop over tokens."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_vlm.models import gated_delta
from mlx_vlm.models.qwen3_5 import gated_delta as gated_delta_of_qwen3_5

from vlm_server.runner.backends.interface import Backend

_NAMES = ("gated_delta_chunked", "gated_delta_ops")
"""mlx-vlm's functions that go by MLX's operations; it takes kernels of its own on Metal."""
_MODULES: tuple[ModuleType, ...] = (gated_delta, gated_delta_of_qwen3_5)
_MLX_VLM = {
    (module, name): getattr(module, name)
    for module in _MODULES
    for name in _NAMES
    if hasattr(module, name)
}


def use_gated_delta(backend: Backend) -> None:
    """Let all hybrid models of this process compute the rule by `backend`, where it does."""
    for (module, name), original in _MLX_VLM.items():
        setattr(module, name, _in_place_of(original, backend))


def _in_place_of(original: Callable[..., Any], backend: Backend) -> Callable[..., Any]:
    def rule(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        beta: mx.array,
        state: mx.array,
        mask: mx.array | None = None,
        state_steps: int | None = None,
    ) -> Any:
        """mlx-vlm's signature; `mask`, (rows, tokens), is False for padding."""
        if state_steps is not None:
            return original(q, k, v, g, beta, state, mask, state_steps)
        if g.ndim == 3:  # a decay for each head, not for each number of its keys
            decay, strength = g, beta
            if mask is not None:
                decay = mx.where(mask[..., None], g, 1)
                strength = mx.where(mask[..., None], beta, 0)
            outputs = backend.gated_delta(q, k, v, decay, strength, state)
            if outputs is not None:
                return outputs
        return original(q, k, v, g, beta, state, mask)

    return rule
