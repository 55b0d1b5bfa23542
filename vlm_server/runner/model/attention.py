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

from vlm_server.runner.backends.bounded_layer import BoundedLayer, LayerBeside
from vlm_server.runner.backends.cpu_attention import attention_on_cpu
from vlm_server.runner.backends.cuda.attention import CudaAttention, kept_plans
from vlm_server.runner.device.device import Device, DeviceKind

_NAME = "scaled_dot_product_attention"
_MLX_VLM = base.scaled_dot_product_attention
_FUSED_HEAD_SIZES = frozenset({64, 72, 80, 96, 128})
"""Those at which MLX fuses attention of many queries on Metal."""
_MOST_SCORE_BYTES = 128 << 20
"""Of a block of queries: more would save no time."""

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

    @property
    def appends_in_place(self) -> bool:
        """Whether `within` writes new keys and values into the buffers that there are."""
        ...

    def within(self, queries: mx.array, layer: BoundedLayer, scale: float) -> mx.array:
        """Attention to each row's keys in `layer`.

        The last query attends to the last of them, each other one to one less than the next.
        """
        ...

    def beside(self, queries: mx.array, layer: LayerBeside, scale: float) -> mx.array:
        """The same for all tokens of a pass, (tokens, heads, 1, head size), as many rows."""
        ...

    def is_planned(self, num_queries: int, num_keys: int) -> bool:
        """Whether a prompt's last queries attend to so many keys without a plan that takes long.

        If not, `plan_next` will plan that.
        """
        ...

    def plan_next(self) -> bool:
        """While nobody waits, prepare a further shape. False if none is left."""
        ...


class MlxAttention:
    """MLX's own, for layers of which a step that is compiled knows the bounds alone."""

    appends_in_place = False

    def within(self, queries: mx.array, layer: BoundedLayer, scale: float) -> mx.array:
        """By MLX's own attention, with a mask."""
        count, columns = queries.shape[2], mx.arange(layer.keys.shape[2])
        starts, first_new = layer.bounds[:, :1], layer.bounds[:, 1:2] - layer.bounds[:, 2:]
        last = (first_new + mx.arange(count))[:, None, :, None]
        mask = (columns <= last) & (columns >= starts[:, None, None])
        return mx.fast.scaled_dot_product_attention(
            queries, layer.keys, layer.values, scale=scale, mask=mask
        )

    def beside(self, queries: mx.array, layer: LayerBeside, scale: float) -> mx.array:
        """Apart, for the rows and for the prompt."""
        assert layer.new is not None
        (mine, theirs), (keys, prompt_keys), (values, prompt_values) = (
            layer.parted(each) for each in (queries, *layer.new)
        )
        layer.rows.update_and_fetch(keys, values)
        layer.prompt.update_and_fetch(prompt_keys, prompt_values)
        of_prompt = self.within(theirs, layer.prompt, scale).transpose(2, 1, 0, 3)
        return mx.concatenate([self.within(mine, layer.rows, scale), of_prompt])

    def is_planned(self, num_queries: int, num_keys: int) -> bool:
        return True

    def plan_next(self) -> bool:
        return False


class CpuAttention(MlxAttention):
    """Plain causal attention in float32: see `cpu_attention`."""

    def takes(self, queries: mx.array, keys: mx.array, mask: Mask) -> bool:
        is_causal = isinstance(mask, str) and mask == "causal"
        return is_causal and queries.dtype == keys.dtype == mx.float32

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask
    ) -> mx.array:
        return attention_on_cpu(queries, keys, values, scale, is_causal=True)


class MetalAttention(MlxAttention):
    """MLX's attention by blocks of queries, where it would hold all scores at once.

    On Metal that is for more than 8 queries of other head sizes than `_FUSED_HEAD_SIZES`; MLX has
    fused kernels for 192 and 256, too, but prefers the other way for speed.
    """

    def takes(self, queries: mx.array, keys: mx.array, mask: Mask) -> bool:
        size = queries.shape[-1]
        return size not in _FUSED_HEAD_SIZES and _queries_at_once(queries, keys) < queries.shape[2]

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask
    ) -> mx.array:
        num_queries, num_keys = queries.shape[2], keys.shape[2]
        is_causal = isinstance(mask, str)
        step, blocks = _queries_at_once(queries, keys), []
        for start in range(0, num_queries, step):
            end = min(start + step, num_queries)
            most = num_keys - num_queries + end if is_causal else num_keys
            part = mask
            if isinstance(mask, mx.array) and mask.shape[-2] > 1:
                part = mask[..., start:end, :]
            blocks.append(
                mx.fast.scaled_dot_product_attention(
                    queries[:, :, start:end],
                    keys[:, :, :most],
                    values[:, :, :most],
                    scale=scale,
                    mask=part,
                )
            )
        return mx.concatenate(blocks, axis=2)


def _queries_at_once(queries: mx.array, keys: mx.array) -> int:
    """So many that their scores, in float32, take `_MOST_SCORE_BYTES`; at least 16."""
    rows, heads = queries.shape[:2]
    return max(16, _MOST_SCORE_BYTES // (4 * rows * heads * keys.shape[2]))


def attention_on(device: Device, context_tokens: int) -> Attention:
    """Ours for a device. `context_tokens`: the most of prompt and answer."""
    if device.is_cpu:
        return CpuAttention()
    if device.kind is DeviceKind.METAL:
        return MetalAttention()
    return CudaAttention(context_tokens, kept_plans())


class ModelAttention:
    """Our attention in the place of mlx-vlm's, in the modules of one model's layers."""

    def __init__(self, language_model: Any, attention: Attention) -> None:
        self.attention = attention
        self._modules = _attending_modules(language_model)

    @property
    def appends_in_place(self) -> bool:
        """See `Attention`."""
        return self.attention.appends_in_place

    def is_planned(self, num_queries: int, num_keys: int) -> bool:
        """See `Attention`."""
        return self.attention.is_planned(num_queries, num_keys)

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
        if isinstance(cache, (BoundedLayer, LayerBeside)):
            if not is_plain or mask is not None:
                raise NotImplementedError("this model attends in a way of its own")
            cache.is_read = True
            if isinstance(cache, LayerBeside):
                return self.attention.beside(queries, cache, scale)
            return self.attention.within(queries, cache, scale)
        if is_plain and self.attention.takes(queries, keys, mask):
            return self.attention(queries, keys, values, scale, mask)
        output: mx.array = _MLX_VLM(
            queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks
        )
        return output


def _attending_modules(language_model: Any) -> Sequence[ModuleType]:
    """The Python modules of a model's layers that call mlx-vlm's attention."""
    modules = {sys.modules[type(layer).__module__] for layer in language_model.modules()}
    return [module for module in modules if getattr(module, _NAME, None) is _MLX_VLM]
