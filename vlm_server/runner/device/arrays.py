"""Reads arrays, and classifies MLX's errors, which have no types.

All arrays are read by `to_numpy`, which evaluates them first: numpy alone would lose the exception,
ask again, and get the bytes of an array that was never computed.

On Metal, a command may fail after the call that launched it has returned. MLX raises such a late
error once, in the next wait for that stream; later waits succeed, with arrays that were never
computed. So where errors are late, the work of one owner (sequences that decode, a prompt, an
encode) is waited for before the next owner's, and after each wait `DeviceErrors.num_late` is
checked.
"""

from __future__ import annotations

from collections.abc import Collection
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
"""Parts of MLX's messages for failed allocations, in lower case."""
_TIME_OUTS = ("errortimeout", "errorhang", "errorimpactinginteractivity", "errorinnocentvictim")
"""Parts of Metal's errors when a command of this or another program ran too long."""
_LATE = "command buffer execution failed"


def to_numpy(array: mx.array) -> NDArray[Any]:
    """A copy of an array's values; waits for the device.

    Raises what MLX raises if they could not be computed: RuntimeError, MemoryError.
    """
    mx.eval(array)
    return np.array(array)  # noqa: TID251  evaluated


def share(array: mx.array) -> NDArray[Any]:
    """An array's own memory, for writing; no other array may share it. Raises as `to_numpy`."""
    mx.eval(array)
    return np.array(array, copy=False)  # noqa: TID251  evaluated


def is_out_of_memory(error: Exception) -> bool:
    """Whether MLX's error is a failed allocation."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in _ALLOCATIONS)


class DeviceErrors:
    """The errors of one model's device."""

    def __init__(self, *, are_late: bool) -> None:
        """are_late: whether work can fail after it was launched."""
        self.are_late = are_late
        self.num_late = 0
        """Number of late errors. Work launched before one, and not waited for, is invalid."""
        self.last_late: RequestError = InternalError("")
        """The last late error."""

    def request_error(self, error: Exception, message: str) -> RequestError:
        """The error of a request that ends with `error`; `message` describes an unusual one."""
        if isinstance(error, RequestError):
            return error
        text = str(error).lower()
        request_error: RequestError = InternalError(message)
        if is_out_of_memory(error):
            request_error = OutOfMemory(_NO_MEMORY)
        elif any(words in text for words in _TIME_OUTS):
            request_error = StepTooLong(_TOO_LONG)
        if _LATE in text:
            self.num_late, self.last_late = self.num_late + 1, request_error
        return request_error


class StepFailures:
    """The failures of one step, while it is launched and finished."""

    def __init__(self, errors: DeviceErrors) -> None:
        self._errors = errors
        self.by_request: dict[str, RequestError] = {}
        """The requests that fail in it."""
        self.last_error: str | None = None
        """The last error of the model or the device."""

    def record(
        self, error: Exception, request_ids: Collection[str] = (), message: str = ""
    ) -> None:
        """Record `error`, with which these requests end.

        `message` describes it to their clients unless it is a usual one.
        """
        self.last_error = f"{type(error).__name__}: {error}"
        failure = self._errors.request_error(error, message)
        self.by_request |= dict.fromkeys(request_ids, failure)
