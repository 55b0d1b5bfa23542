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
    """The lazy result of `compute`; where media are encoded in turns, yields each layer's before.

    Layers are modules of mlx-vlm in a list of several modules of their class, outside the language
    model.
    """
    if not loaded.backend.encodes_in_turns:
        return compute()
    with _record_results(_layer_types(loaded.model)) as results:
        result = compute()
    while results:
        yield [results.pop(0)]
    return result


def _layer_types(model: Any) -> list[type]:
    children = [child for name, child in model.children().items() if name != "language_model"]
    towers = [child for child in children if not isinstance(child, list)]
    modules = [module for tower in towers for module in tower.modules()]
    children = [child for module in modules for child in module.children().values()]
    lists = [child for child in children if isinstance(child, list)]
    counts = [Counter(type(module) for module in _flat(layers)) for layers in lists]
    types = {kind for count in counts for kind, number in count.items() if number > 1}
    return [kind for kind in types if kind.__module__.startswith("mlx_vlm.")]


def _flat(modules: list[Any]) -> Iterator[Any]:
    """The modules of a list, which may be nested, as MobileNet's stages are."""
    for module in modules:
        yield from _flat(module) if isinstance(module, list) else [module]


@contextmanager
def _record_results(types: list[type]) -> Iterator[list[mx.array]]:
    """The results of modules of these classes in the `with` block, in order."""
    results: list[mx.array] = []
    calls: dict[Any, Any] = {kind: call for kind in types if (call := vars(kind).get("__call__"))}
    for kind, call in calls.items():
        kind.__call__ = _recording(call, results)
    try:
        yield results
    finally:
        for kind, call in calls.items():
            kind.__call__ = call


def _recording(call: Callable[..., Any], results: list[mx.array]) -> Callable[..., Any]:
    def recording(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        results.append(result[0] if isinstance(result, tuple) else result)
        return result

    return recording
