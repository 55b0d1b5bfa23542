"""How MLX's arrays are read: all of them by `read`, which evaluates first.

numpy asks an array for its buffer, loses the exception if computing it failed, and asks again; by
then MLX has told the error and forgotten it, and what was never computed is read as numbers. On
Metal every failure is late like this: out of memory, time-outs, another program's faults.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray


def read(array: mx.array) -> NDArray[Any]:
    """A copy of an array's values; waits for the device.

    Raises what MLX raises if they could not be computed: RuntimeError, MemoryError.
    """
    mx.eval(array)
    return np.array(array)  # noqa: TID251  evaluated


def share(array: mx.array) -> NDArray[Any]:
    """An array's own memory, to be written to; it must be nobody else's. Raises as `read`."""
    mx.eval(array)
    return np.array(array, copy=False)  # noqa: TID251  evaluated
