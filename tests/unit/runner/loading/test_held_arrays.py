"""Every array is found, wherever a module holds it, and can then be read on any thread."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from vlm_server.runner.loading.held_arrays import arrays_of


class Rope:
    """An object that is no module, as some rotary embeddings are."""

    def __init__(self, number: float) -> None:
        self._inv_freq = lazy(number)

    def apply(self) -> mx.array:
        return self._inv_freq


class Slotted:
    __slots__ = ("array", "unset")

    def __init__(self, number: float) -> None:
        self.array = lazy(number)


def lazy(number: float) -> mx.array:
    return mx.array([number]) * 2


def everywhere() -> nn.Module:
    model = nn.Module()
    model.weight = lazy(0)
    model._private = lazy(1)
    model.rope = Rope(2)
    model.layers = [nn.Module(), {"a": (lazy(3), Rope(4))}]
    model.layers[0].inner = Slotted(5)
    model.rotate = Rope(6).apply
    object.__setattr__(model, "plain", lazy(7))
    model.itself = model
    return model


def test_held_arrays_are_found_exactly_once():
    found = arrays_of(everywhere())
    assert sorted(float(array.item()) for array in found) == [2 * n for n in range(8)]


def test_strings_configurations_and_classes_hold_no_arrays():
    assert arrays_of([None, "text", 7, nn.Linear, mx, {"a": b"b"}]) == []


def test_evaluated_arrays_are_read_on_another_thread():
    """A lazy array needs its stream, which other threads do not have."""
    model = everywhere()
    mx.eval(arrays_of(model))
    results: list[float] = []
    thread = threading.Thread(
        target=lambda: results.extend(float(np.array(each)[0]) for each in arrays_of(model))
    )
    thread.start()
    thread.join()
    assert sorted(results) == [2 * n for n in range(8)]


@pytest.mark.parametrize("holder", [[], (), set(), {}])
def test_empty_module_holds_no_arrays(holder: Any):
    assert arrays_of(holder) == []
