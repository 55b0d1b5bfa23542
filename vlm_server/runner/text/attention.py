"""Lets a language model attend by our own attention where a device gains by it.

mlx-vlm's language models call one function of their modules, `scaled_dot_product_attention`. While
a chunk or a step is launched ours takes its place there: it computes what it takes, and hands
everything else to mlx-vlm's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Protocol

import mlx.core as mx
from mlx_vlm.models import base

from vlm_server.runner.cpu_attention import attention_on_cpu
from vlm_server.runner.device.device import Device, DeviceKind
from vlm_server.runner.text.cuda_attention import CudaAttention, kept_plans

_NAME = "scaled_dot_product_attention"
_MLX_VLM = base.scaled_dot_product_attention

Mask = mx.array | str | None
"""`causal`, or what may be attended to: (rows or 1, 1, queries, keys) bool; None for all."""


class Attention(Protocol):
    """Computes `softmax(queries @ keys.T * scale) @ values`, (rows, heads, tokens, head size).

    There may be fewer heads of keys and values than of queries, which then share them in turn.
    """

    def takes(self, queries: mx.array, keys: mx.array, mask: Mask) -> bool:
        """Whether it computes this, and is faster."""
        ...

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask
    ) -> mx.array: ...

    def plan_next(self) -> bool:
        """While nobody waits, prepare a further shape. False if none is left."""
        ...


class CpuAttention:
    """Plain causal attention in float32: see `cpu_attention`."""

    def takes(self, queries: mx.array, keys: mx.array, mask: Mask) -> bool:
        is_causal = isinstance(mask, str) and mask == "causal"
        return is_causal and queries.dtype == keys.dtype == mx.float32

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask
    ) -> mx.array:
        return attention_on_cpu(queries, keys, values, scale, is_causal=True)

    def plan_next(self) -> bool:
        return False


def attention_on(device: Device, context_tokens: int) -> Attention | None:
    """Ours; None where MLX's own is as good. `context_tokens`: the most of prompt and answer."""
    if device.is_cpu:
        return CpuAttention()
    if device.kind is not DeviceKind.CUDA:
        return None
    return CudaAttention(context_tokens, kept_plans())


class ModelAttention:
    """Our attention in the place of mlx-vlm's, in the modules of one model's layers."""

    def __init__(self, language_model: Any, attention: Attention | None) -> None:
        self.attention = attention
        self._modules = _attending_modules(language_model) if attention else ()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the layers attend by ours; for one thread at a time."""
        for module in self._modules:
            setattr(module, _NAME, self._attend)
        try:
            yield
        finally:
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
        """As mlx-vlm's: (rows, heads, tokens, head size) of queries, keys and values."""
        is_plain = isinstance(keys, mx.array) and sinks is None
        if is_plain and self.attention and self.attention.takes(queries, keys, mask):
            return self.attention(queries, keys, values, scale, mask)
        output: mx.array = _MLX_VLM(
            queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks
        )
        return output


def _attending_modules(language_model: Any) -> Sequence[ModuleType]:
    """The Python modules of a model's layers that call mlx-vlm's attention."""
    modules = {sys.modules[type(layer).__module__] for layer in language_model.modules()}
    return [module for module in modules if getattr(module, _NAME, None) is _MLX_VLM]
