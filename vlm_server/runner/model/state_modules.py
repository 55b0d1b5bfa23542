"""Modules of layers with recurrent states, such as a linear attention or a short convolution.

They take the states of two more kinds of steps: a mixed step, and a step whose last tokens may be
rejected, after which the states are computed again from their inputs.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import ArraysCache

from vlm_server.runner.backends.bounded_layer import MixedStates, StepStates
from vlm_server.runner.kv.layers import new_layers
from vlm_server.runner.model.adapters import chosen, chosen_now, chosen_part

_STATE_BLOCK = 64
"""Multiple to which the tokens of a prompt are padded for a layer with states.

mlx-vlm has their number as a constant in its operations, and so MLX would compile another kernel
for each number of rows beside a prompt.
"""


class StateModule:
    """A module of a layer with states, which are computed in the order of a sequence's tokens."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a module."""

    function: Callable[..., Any]
    bound: inspect.BoundArguments
    adapters: mx.array | None
    """See `runner.model.adapters.chosen`."""

    def repeat(
        self, states: ArraysCache, rows: mx.array, shape: tuple[int, int], count: int
    ) -> None:
        """Append the first `count` tokens of `rows` to their `states`.

        Arrays of the arguments that begin with `shape`, (rows, tokens), are cut accordingly.
        """
        arguments = {
            name: value[rows, :count]
            if isinstance(value, mx.array) and value.shape[:2] == shape
            else value
            for name, value in self.bound.arguments.items()
        } | {"cache": states}
        if "mask" in arguments:
            arguments["mask"] = None
        bound = inspect.BoundArguments(self.bound.signature, OrderedDict(arguments))
        with chosen(None if self.adapters is None else self.adapters[rows]):
            self.function(*bound.args, **bound.kwargs)


class RecordedStates(ArraysCache):  # type: ignore[misc]  # mlx-vlm is not typed
    """The states of a layer in a step whose last tokens may be rejected; see `commit`."""

    def __init__(self, layer: ArraysCache) -> None:
        self.cache = list(layer.cache)
        self._layer = layer
        self._before: list[mx.array | None] = list(layer.cache)
        self._calls: list[_Call] = []

    @property
    def is_recorded(self) -> bool:
        """Whether a `StateModule` has used the states."""
        return bool(self._calls)

    def record(self, call: _Call) -> None:
        self._calls.append(call)

    def commit(self, kept: Sequence[int], count: int) -> None:
        """Let the layer have the states after the first `kept` of each row's `count` tokens."""
        if all(number == count for number in kept):
            self._layer.cache = self.cache
            return
        order: list[int] = []
        parts: list[list[mx.array]] = []
        for number in sorted(set(kept)):
            rows = [row for row, kept_of_row in enumerate(kept) if kept_of_row == number]
            order += rows
            parts.append(self._states_after(rows, (len(kept), count), number))
        places = mx.array(sorted(range(len(order)), key=order.__getitem__))
        self._layer.cache = [
            states[0] if len(parts) == 1 else mx.concatenate(list(states))[places]
            for states in zip(*parts, strict=True)
        ]

    def _states_after(self, rows: list[int], shape: tuple[int, int], number: int) -> list[mx.array]:
        indices = mx.array(rows)
        states = ArraysCache(len(self._before))
        states.cache = [None if array is None else array[indices] for array in self._before]
        for call in self._calls:
            call.repeat(states, indices, shape, number)
        return list(states.cache)


def use_state_modules(language_model: Any) -> None:
    """Let the modules of layers with states take `MixedStates` and `RecordedStates`."""
    if not any(isinstance(layer, ArraysCache) for layer in new_layers(language_model)):
        return
    for layer in getattr(language_model, "layers", ()):
        for module in layer.children().values():
            if not isinstance(module, StateModule) and _takes_cache(module):
                module.__class__ = _state_type(type(module))


def records_states(language_model: Any) -> bool:
    """Whether all layers with states can be computed again: a lazy call without an evaluation."""
    recorded = [
        RecordedStates(layer) if isinstance(layer, ArraysCache) else layer
        for layer in new_layers(language_model)
    ]
    language_model(mx.zeros((1, 2), mx.int32), cache=recorded)
    return all(layer.is_recorded for layer in recorded if isinstance(layer, RecordedStates))


def _takes_cache(module: Any) -> bool:
    return callable(module) and "cache" in inspect.signature(type(module).__call__).parameters


def _state_type(module_type: Any) -> type:
    signature = inspect.signature(module_type.__call__)
    call = module_type.__call__
    place = list(signature.parameters).index("cache") - 1

    def state_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """`call`; of `MixedStates`, for the rows and for the prompt, each with its states."""
        states = kwargs["cache"] if "cache" in kwargs else args[place] if args[place:] else None
        if not isinstance(states, MixedStates | RecordedStates):
            return call(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        if isinstance(states, RecordedStates):
            states.record(_Call(call, bound, chosen_now()))
            return call(self, *args, **kwargs)
        _, name, *_ = bound.arguments
        x = bound.arguments[name]

        def part(x: mx.array, states: StepStates) -> mx.array:
            bound.arguments |= {name: x, "cache": states}
            if "mask" in signature.parameters:
                bound.arguments["mask"] = states.make_mask(x.shape[1])
            output: mx.array = call(*bound.args, **bound.kwargs)
            return output

        prompt = x[states.num_rows :].swapaxes(0, 1)
        count = prompt.shape[1]
        padded = mx.pad(prompt, [(0, 0), (0, -count % _STATE_BLOCK), (0, 0)])
        with chosen_part(states.num_rows, states.num_rows + 1):  # that of the whole prompt
            outputs = [part(padded, states.prompt)[:, :count].swapaxes(0, 1)]
        if states.rows is not None:
            with chosen_part(0, states.num_rows):
                outputs.insert(0, part(x[: states.num_rows], states.rows))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    return type(
        f"State{module_type.__name__}", (StateModule, module_type), {"__call__": state_call}
    )
