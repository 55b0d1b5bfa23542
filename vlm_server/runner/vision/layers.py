"""Splits an encode by mlx-vlm's own vision tower into the results of its layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import mlx.core as mx

from vlm_server.runner.loaded import LoadedModel

T = TypeVar("T")


def by_layers(loaded: LoadedModel, compute: Callable[[], T]) -> Generator[list[mx.array], None, T]:
    """The lazy result of `compute`; where media are encoded in turns, yields each layer's first.

    Layers are modules of mlx-vlm's that stand in a list with others of their class, outside of the
    language model.
    """
    if not loaded.backend.encodes_in_turns:
        return compute()
    with _recorded(_layer_types(loaded.model)) as results:
        made = compute()
    while results:
        yield [results.pop(0)]
    return made


def _layer_types(model: Any) -> list[type]:
    children = [child for name, child in model.children().items() if name != "language_model"]
    towers = [child for child in children if not isinstance(child, list)]
    modules = [module for tower in towers for module in tower.modules()]
    lists = [each for one in modules for each in one.children().values() if isinstance(each, list)]
    counts = [Counter(type(module) for module in _flat(each)) for each in lists]
    types = {one for count in counts for one, number in count.items() if number > 1}
    return [one for one in types if one.__module__.startswith("mlx_vlm.")]


def _flat(modules: list[Any]) -> Iterator[Any]:
    """The modules of a list that may have lists in it, as MobileNet's stages are."""
    for one in modules:
        yield from _flat(one) if isinstance(one, list) else [one]


@contextmanager
def _recorded(types: list[type]) -> Iterator[list[mx.array]]:
    """The results of modules of these classes while the context lasts, in order."""
    results: list[mx.array] = []
    calls: dict[Any, Any] = {one: call for one in types if (call := vars(one).get("__call__"))}
    for one, call in calls.items():
        one.__call__ = _recording(call, results)
    try:
        yield results
    finally:
        for one, call in calls.items():
            one.__call__ = call


def _recording(call: Callable[..., Any], results: list[mx.array]) -> Callable[..., Any]:
    def recording(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        results.append(result[0] if isinstance(result, tuple) else result)
        return result

    return recording
