"""Modules of layers with recurrent states, such as a linear attention or a short convolution.

They take the states of two more kinds of steps: a mixed step, and a step whose last tokens may be
rejected, after which the states are computed again from their inputs.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import ArraysCache

from vlm_server.interfaces.prompts import MAX_INNER_TOKENS
from vlm_server.runner.backends.bounded_layer import MixedStates, StepStates
from vlm_server.runner.device.arrays import to_numpy
from vlm_server.runner.kv.layers import can_store, has_states, new_layers
from vlm_server.runner.model.adapters import chosen, chosen_now, chosen_part

_STATE_BLOCK = MAX_INNER_TOKENS
"""Multiple to which the tokens of a prompt are padded for a layer with states.

mlx-vlm has their number as a constant in its operations, and so MLX would compile another kernel
for each number of rows beside a prompt.
"""
_NOT_PADDING = 5
_TOLERANCE = 0.05
"""Largest difference of states that is rounding, as a share of the largest number."""


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
            arguments["mask"] = states.make_mask(count) if states.lengths is not None else None
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
    def modules(self) -> tuple[type, ...]:
        """The classes of the modules that have used the states; none if these were no
        `StateModule`s."""
        return tuple(type(call.bound.arguments["self"]) for call in self._calls)

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
            indices = mx.array(rows)
            states = ArraysCache(len(self._before))
            states.cache = [None if array is None else array[indices] for array in self._before]
            parts.append(self._repeat(states, indices, (len(kept), count), number))
        places = mx.array(sorted(range(len(order)), key=order.__getitem__))
        self._layer.cache = [
            states[0] if len(parts) == 1 else mx.concatenate(list(states))[places]
            for states in zip(*parts, strict=True)
        ]

    def ignores_padding(self, count: int, kept: int) -> bool:
        """Whether the first `kept` of the only row's `count` tokens give the same states without
        the others and with them as padding; waits for the device."""
        row, shape = mx.array([0]), (1, count)
        whole = ArraysCache(len(self._before))
        padded: Any = StepStates([], mx.array([kept]))
        padded.cache = list(self._before)
        self._repeat(whole, row, shape, kept)
        self._repeat(padded, row, shape, count)
        pairs = zip(whole.cache, padded.cache, strict=True)
        distances = [mx.abs(a - b).max() / mx.maximum(mx.abs(a).max(), 1e-9) for a, b in pairs]
        return all(to_numpy(distance.astype(mx.float32)) < _TOLERANCE for distance in distances)

    def _repeat(
        self, states: ArraysCache, rows: mx.array, shape: tuple[int, int], count: int
    ) -> list[mx.array]:
        for call in self._calls:
            call.repeat(states, rows, shape, count)
        return list(states.cache)


def use_state_modules(language_model: Any) -> None:
    """Let the modules of layers with states take `MixedStates` and `RecordedStates`."""
    if not any(isinstance(layer, ArraysCache) for layer in new_layers(language_model)):
        return
    for layer in getattr(language_model, "layers", ()):
        for module in layer.children().values():
            if not isinstance(module, StateModule) and _takes_cache(module):
                module.__class__ = _state_type(type(module))


def can_forget(language_model: Any) -> bool:
    """Whether the layers of a model can remove rejected tokens."""
    if not can_store(language_model):
        return False
    return not has_states(new_layers(language_model)) or records_states(language_model)


def records_states(language_model: Any) -> bool:
    """Whether all layers with states can be computed again."""
    return all(layer.modules for layer in _recorded(language_model, 2))


def states_ignore_padding(language_model: Any) -> bool:
    """Whether padding after a prompt's tokens changes no states, of one layer of each kind."""
    recorded = _recorded(language_model, _STATE_BLOCK)
    kinds = {layer.modules: layer for layer in reversed(recorded)}
    return () not in kinds and all(
        layer.ignores_padding(_STATE_BLOCK, _NOT_PADDING) for layer in kinds.values()
    )


def _recorded(language_model: Any, count: int) -> list[RecordedStates]:
    """The layers with states after a lazy call of `count` tokens."""
    recorded = [
        RecordedStates(layer) if isinstance(layer, ArraysCache) else layer
        for layer in new_layers(language_model)
    ]
    language_model(mx.arange(count)[None], cache=recorded)
    return [layer for layer in recorded if isinstance(layer, RecordedStates)]


def _of_prompt(
    prompt: mx.array, states: MixedStates, part: Callable[[mx.array, StepStates], mx.array]
) -> mx.array:
    """The output of a module for a prompt's tokens, (1, tokens, hidden), one part after the other.

    All parts but the first one have at most `MAX_INNER_TOKENS`. `part` computes padded tokens.
    """
    count = prompt.shape[1]
    padded = mx.pad(prompt, [(0, 0), (0, -count % _STATE_BLOCK), (0, 0)])
    before = list(states.parts[0].cache)
    outputs = [part(padded, states.parts[0])]
    token, place = mx.arange(count), mx.arange(count)
    for start, (previous, states_after) in zip(states.starts, pairwise(states.parts), strict=True):
        for i, array in enumerate(previous.cache):
            if array is not before[i]:  # by this module, and not by another one of its layer
                states_after.cache[i] = array
        before = list(states_after.cache)
        first_place = sum(output.shape[1] for output in outputs)
        place = mx.where(token < start, place, first_place + token - start)
        tokens = mx.minimum(start + mx.arange(_STATE_BLOCK), count - 1)
        outputs.append(part(prompt[:, tokens], states_after))
    if len(outputs) == 1:
        return outputs[0][:, :count]
    output = mx.concatenate(outputs, axis=1)
    return output[:, mx.minimum(place, output.shape[1] - 1)]


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

        with chosen_part(states.num_rows, states.num_rows + 1):  # that of the whole prompt
            outputs = [_of_prompt(x[states.num_rows :].swapaxes(0, 1), states, part).swapaxes(0, 1)]
        if states.rows is not None:
            with chosen_part(0, states.num_rows):
                outputs.insert(0, part(x[: states.num_rows], states.rows))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    return type(
        f"State{module_type.__name__}", (StateModule, module_type), {"__call__": state_call}
    )
