"""LoRA adapters of a loaded model, chosen row by row.

Each adapted layer has the matrices of all adapters side by side. A row's product with those of
other adapters is replaced by zeros, so rows of the base and of several adapters share a step, and a
row of the base gets exactly what it would get without adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

ADAPTERS = "adapters"
"""The name of a pass's input with each token's adapter, (rows, tokens) or (rows, 1) int32."""
BASE = 0
"""The number of no adapter; those of adapters follow."""

_chosen: ContextVar[mx.array | None] = ContextVar("adapters of the pass being built", default=None)


_reached: ContextVar[set[int] | None] = ContextVar("adapted layers of the pass", default=None)


@dataclass(frozen=True, slots=True)
class LayerDelta:
    """What an adapter adds to `layer`: `x @ a @ b`, in the layer's type.

    name: the layer's, for errors. a: (inputs, rank). b: (rank, outputs), its scale included.
    """

    name: str
    layer: Any
    a: mx.array
    b: mx.array


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of a model. digest: a hash of its files."""

    name: str
    digest: str
    deltas: tuple[LayerDelta, ...]

    @property
    def arrays(self) -> list[mx.array]:
        return [array for delta in self.deltas for array in (delta.a, delta.b)]


@contextmanager
def chosen(adapters: mx.array | None) -> Iterator[None]:
    """Let the rows of passes built in the block have these adapters: see `ADAPTERS`.

    None for rows of the base alone, which skip all products with adapters.
    """
    token = _chosen.set(adapters)
    try:
        yield
    finally:
        _chosen.reset(token)


def chosen_now() -> mx.array | None:
    """The adapters of the pass that is being built: see `chosen`."""
    return _chosen.get()


@contextmanager
def chosen_part(first: int, end: int | None) -> Iterator[None]:
    """Let rows `first` to `end` of those chosen be all rows in the block."""
    adapters = _chosen.get()
    with chosen(None if adapters is None else adapters[first:end]):
        yield


@contextmanager
def reached() -> Iterator[set[int]]:
    """The adapted layers, by `id`, that passes built in the block call."""
    token = _reached.set(layers := set[int]())
    try:
        yield layers
    finally:
        _reached.reset(token)


@contextmanager
def applied(inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The inputs of a pass but for its adapters, which are `chosen` in the block."""
    others = dict(inputs)
    with chosen(others.pop(ADAPTERS, None)):
        yield others


def adapters_of_rows(numbers: Sequence[int]) -> dict[str, mx.array]:
    """The input of rows with adapters of these numbers; none if all are of the base."""
    return {ADAPTERS: mx.array([*numbers], mx.int32)[:, None]} if any(numbers) else {}


def attach(adapters: Sequence[Adapter]) -> None:
    """Let the layers of a loaded model add what these adapters do, of numbers 1, 2, ..."""
    by_layer = dict[int, list[tuple[int, LayerDelta]]]()
    for number, adapter in enumerate(adapters, start=BASE + 1):
        for delta in adapter.deltas:
            by_layer.setdefault(id(delta.layer), []).append((number, delta))
    for deltas in by_layer.values():
        layer = deltas[0][1].layer
        layer.lora_a = mx.concatenate([delta.a for _, delta in deltas], axis=1)
        layer.lora_b = mx.concatenate([delta.b for _, delta in deltas])
        ranks = [number for number, delta in deltas for _ in range(delta.a.shape[1])]
        layer.lora_owners = mx.array(ranks, mx.int32)
        layer.__class__ = _adapted(type(layer))  # type: ignore[arg-type]  # classes are hashable
        mx.eval(layer.lora_a, layer.lora_b, layer.lora_owners)


@cache
def _adapted(kind: Any) -> type:
    """A subclass of a linear layer that adds what each row's adapter does."""

    def call(self: Any, x: mx.array) -> mx.array:
        if (layers := _reached.get()) is not None:
            layers.add(id(self))
        output: mx.array = kind.__call__(self, x)
        adapters = _chosen.get()
        return output if adapters is None else output + _delta(self, x, adapters, output.dtype)

    return type(f"Adapted{kind.__name__}", (kind,), {"__call__": call})


def _delta(layer: Any, x: mx.array, adapters: mx.array, dtype: mx.Dtype) -> mx.array:
    """(..., outputs), for `x` with the rows of `adapters`, or with the tokens of all in order.

    Raises NotImplementedError for `x` of another layout.
    """
    has_rows = len(x) in (1, len(adapters)) if x.ndim > 2 else len(x) % len(adapters) == 0
    if not has_rows:
        raise NotImplementedError(f"its rows are not the first axis of {x.shape}")
    inner = (x @ layer.lora_a).reshape(len(adapters), -1, len(layer.lora_owners))
    own = mx.where(adapters[..., None] == layer.lora_owners, inner, mx.zeros_like(inner))
    delta: mx.array = own @ layer.lora_b
    return delta.reshape(*x.shape[:-1], -1).astype(dtype)
