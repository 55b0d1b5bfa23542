"""Reads arrays, and sorts MLX's errors, which have no types.

All arrays are read by `read`, which evaluates first: numpy alone would lose MLX's exception, ask
again, and get the bytes of an array that was never computed.

Metal runs commands after the call that launched them has returned, and MLX raises an error once, in
the next wait for its stream; later waits succeed, with arrays that were never computed. So where
errors come late, the work of one owner (sequences that decode, a prompt, an encode) is waited for
before another's, and an owner that saw no error asks whether another saw one meanwhile.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from vlm_server.errors import InternalError, OutOfMemory, RequestError, StepTooLong

_NO_MEMORY = "The device ran out of memory; please try again."
_TOO_LONG = "The device ended a step that took too long; please try again."
_ALLOCATIONS = (
    "malloc]",
    "out of memory",
    "unable to allocate",
    "cudamalloc",
    "insufficient memory",  # Metal's, of commands that had begun
    "callbackerroroutofmemory",
)
"""Parts of what MLX says if an allocation fails, in small letters."""
_TIME_OUTS = ("errortimeout", "errorhang", "errorimpactinginteractivity", "errorinnocentvictim")
"""Parts of errors of commands that held the GPU too long, or another program's did, on Metal."""
_LATE = "command buffer execution failed"


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


def is_out_of_memory(error: Exception) -> bool:
    """Whether MLX says that an allocation failed."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in _ALLOCATIONS)


class Faults:
    """The errors of one model's device."""

    def __init__(self, *, come_late: bool) -> None:
        """`come_late`: whether work can fail after it was launched."""
        self.come_late = come_late
        self.num_late = 0
        """Number of late errors so far. What was launched before one, and not waited for, may never
        have been computed."""
        self.last_late: RequestError = InternalError("")
        """The last late error."""

    def request_error(self, error: Exception, message: str) -> RequestError:
        """The error of a request that ends with `error`; with `message` if that is no usual one."""
        if isinstance(error, RequestError):
            return error
        text = str(error).lower()
        found: RequestError = InternalError(message)
        if is_out_of_memory(error):
            found = OutOfMemory(_NO_MEMORY)
        elif any(words in text for words in _TIME_OUTS):
            found = StepTooLong(_TOO_LONG)
        if _LATE in text:
            self.num_late, self.last_late = self.num_late + 1, found
        return found
