"""Arrays as bytes, of any type that MLX or numpy has."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
from numpy.typing import NDArray

from vlm_server.runner.device.arrays import read

_PREFIX = "mlx.core."
_DTYPES = {
    str(each).removeprefix(_PREFIX): each
    for each in vars(mx).values()
    if isinstance(each, mx.Dtype)
}


class Array(msgspec.Struct, frozen=True, array_like=True):
    """The bytes of an array in row-major order; `dtype` is a name of MLX's or numpy's."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def of_numpy(array: NDArray[Any]) -> Array:
    """A copy of `array`."""
    return Array(array.dtype.name, array.shape, array.tobytes())


def to_numpy(array: Array) -> NDArray[Any]:
    """A read-only view of its bytes."""
    return np.frombuffer(array.data, dtype=array.dtype).reshape(array.shape)


def of_mlx(array: mx.array) -> Array:
    """A copy; waits for the device."""
    name = str(array.dtype).removeprefix(_PREFIX)
    raw = read(mx.contiguous(array).reshape(-1).view(mx.uint8))  # numpy has no bfloat16
    return Array(name, tuple(array.shape), raw.tobytes())


def to_mlx(array: Array) -> mx.array:
    """A new array on the device."""
    raw = mx.array(np.frombuffer(array.data, dtype=np.uint8))
    return raw.view(_DTYPES[array.dtype]).reshape(array.shape)
