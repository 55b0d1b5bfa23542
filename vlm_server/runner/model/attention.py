"""A backend's attention and gated delta rule in the place of mlx-vlm's, where they are faster.

mlx-vlm's language models call one function of their modules, `scaled_dot_product_attention`. While
a chunk or a step is launched, ours replaces it: it computes the shapes that it supports, and calls
mlx-vlm's for all others. The gated delta rule, which off Metal is a loop over tokens, is replaced
once for all models.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_vlm.models import base, gated_delta
from mlx_vlm.models.qwen3_5 import gated_delta as gated_delta_of_qwen3_5

from vlm_server.runner.backends.bounded_layer import BoundedLayer, MixedLayer
from vlm_server.runner.backends.interface import Attention, Backend, Mask

_NAME = "scaled_dot_product_attention"
_MLX_VLM = base.scaled_dot_product_attention
_RULE_NAMES = ("gated_delta_chunked", "gated_delta_ops")
"""mlx-vlm's functions that go by MLX's operations; it takes kernels of its own on Metal."""
_RULE_MODULES: tuple[ModuleType, ...] = (gated_delta, gated_delta_of_qwen3_5)
_RULES = {
    (module, name): getattr(module, name)
    for module in _RULE_MODULES
    for name in _RULE_NAMES
    if hasattr(module, name)
}


class ModelAttention:
    """Our attention in the place of mlx-vlm's, in the modules of one model's layers."""

    def __init__(self, language_model: Any, attention: Attention) -> None:
        self.attention = attention
        self._modules = _attending_modules(language_model)
        self._layers = dict[int, BoundedLayer | MixedLayer]()
        """The layers of the step being built, by `id` of the keys that they returned."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the attention of the layers; for one thread at a time."""
        for module in self._modules:
            setattr(module, _NAME, self._attend)
        self._layers = {}
        try:
            yield
        finally:
            self._layers = {}
            for module in self._modules:
                setattr(module, _NAME, _MLX_VLM)

    def _attend(
        self,
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Mask,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """mlx-vlm's signature: queries, keys and values are (rows, heads, tokens, head size)."""
        is_plain = isinstance(keys, mx.array) and sinks is None
        layer = self._layers.get(id(keys))  # the keys may be shared with an earlier layer
        if layer is None and isinstance(cache, BoundedLayer | MixedLayer):
            if keys.shape != cache.state[0].shape:  # they may be of another dtype
                raise NotImplementedError("this model attends to other keys than its layers have")
            layer = self._layers[id(keys)] = cache
        if layer is not None:
            if not is_plain or mask is not None:
                raise NotImplementedError("this model attends in a way of its own")
            layer.was_attended = True
            if isinstance(layer, MixedLayer):
                return self.attention.attend_mixed(queries, layer, scale)
            return self.attention.attend_bounded(queries, layer, scale)
        if is_plain and self.attention.supports(queries, keys, mask):
            return self.attention(queries, keys, values, scale, mask)
        output: mx.array = _MLX_VLM(
            queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks
        )
        return output


def _attending_modules(language_model: Any) -> Sequence[ModuleType]:
    """The Python modules of a model's layers that call mlx-vlm's attention."""
    modules = {sys.modules[type(layer).__module__] for layer in language_model.modules()}
    return [module for module in modules if getattr(module, _NAME, None) is _MLX_VLM]


def use_gated_delta(backend: Backend) -> None:
    """Let all hybrid models of this process compute the rule by `backend`, where it does."""
    for (module, name), original in _RULES.items():
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
