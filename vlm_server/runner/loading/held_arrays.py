"""Finds every array that a loaded model holds, whether it is a parameter or not.

MLX arrays are lazy, and a lazy array can only be evaluated on a thread that has its stream. A
model is loaded on one thread and its vision tower runs on another, so nothing may stay lazy.
`model.parameters()` misses arrays in private attributes and in objects that are no modules, such
as the frequencies of some rotary embeddings.
"""

from __future__ import annotations

import types
from typing import Any

import mlx.core as mx

_LEAVES = (str, bytes, int, float, complex, type, types.ModuleType, types.FunctionType)


def arrays_of(root: Any) -> list[mx.array]:
    """All arrays that can be reached from `root`, each once.

    Follows attributes, items of modules and mappings, members of lists, tuples and sets, and
    the objects of bound methods.
    """
    arrays: list[mx.array] = []
    objects: dict[int, Any] = {}  # holds the objects, so that no id is used twice
    remaining = [root]
    while remaining:
        member = remaining.pop()
        if member is None or isinstance(member, _LEAVES) or id(member) in objects:
            continue
        objects[id(member)] = member
        if isinstance(member, mx.array):
            arrays.append(member)
        else:
            remaining += _members(member)
    return arrays


def _members(holder: Any) -> list[Any]:
    members = list(getattr(holder, "__dict__", {}).values())
    if isinstance(holder, dict):  # MLX's modules are dicts
        members += holder.values()
    elif isinstance(holder, list | tuple | set | frozenset):
        members += holder
    elif isinstance(holder, types.MethodType):
        members.append(holder.__self__)
    for kind in type(holder).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        members += [getattr(holder, name, None) for name in names]
    return members
