"""Lets prefill chunks on a CPU attend by our own attention.

mlx-vlm's language models call one function of their modules, `scaled_dot_product_attention`. While
a chunk is launched ours takes its place there: it computes plain causal attention in float32, and
hands everything else to mlx-vlm's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_vlm.models import base

from vlm_server.runner.cpu_attention import attention_on_cpu

_NAME = "scaled_dot_product_attention"
_MLX_VLM = base.scaled_dot_product_attention


def attending_modules(language_model: Any) -> tuple[ModuleType, ...]:
    """The Python modules of a model's layers that call mlx-vlm's attention."""
    modules = {sys.modules[type(layer).__module__] for layer in language_model.modules()}
    return tuple(module for module in modules if getattr(module, _NAME, None) is _MLX_VLM)


@contextmanager
def our_attention(modules: Sequence[ModuleType]) -> Iterator[None]:
    """Let layers of these modules attend by `attend`; for one thread at a time."""
    for module in modules:
        setattr(module, _NAME, attend)
    try:
        yield
    finally:
        for module in modules:
            setattr(module, _NAME, _MLX_VLM)


def attend(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """As mlx-vlm's: (rows, heads, tokens, head size) of queries, keys and values."""
    is_plain = isinstance(keys, mx.array) and sinks is None and isinstance(mask, str)
    if is_plain and mask == "causal" and queries.dtype == keys.dtype == mx.float32:
        return attention_on_cpu(queries, keys, values, scale, is_causal=True)
    output: mx.array = _MLX_VLM(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)
    return output
