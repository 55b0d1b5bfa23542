"""Lets a language model on a CPU attend to its prompt by our own attention.

mlx-vlm's language models call one function of their modules, `scaled_dot_product_attention`. Ours
takes its place there: it computes prefill chunks of plain causal attention in float32, and hands
everything else, decode steps among it, to mlx-vlm's.
"""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
from mlx_vlm.models import base

from vlm_server.runner.cpu_attention import attention_on_cpu

_NAME = "scaled_dot_product_attention"


def use_cpu_attention(language_model: Any) -> bool:
    """Let the layers of a loaded model attend by ours; False if they don't call mlx-vlm's.

    It holds for all models of those modules, in this process.
    """
    modules = [sys.modules[type(module).__module__] for module in language_model.modules()]
    calling = [m for m in modules if getattr(m, _NAME, None) in (_MLX_VLM, attend)]
    for module in calling:
        setattr(module, _NAME, attend)
    return bool(calling)


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


_MLX_VLM = base.scaled_dot_product_attention
