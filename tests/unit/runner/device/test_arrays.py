"""An array that could not be computed is never read as numbers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from vlm_server.runner.device.arrays import share, to_numpy


def failing() -> mx.array:
    """Launched, and known to have failed when it is waited for: on Metal, every failure is so."""
    slow = mx.random.normal((600, 600))
    singular = mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)
    array = ((slow @ slow)[0, 0] * 0 + singular[0, 0] * 0 + 5).astype(mx.int32)[None]
    mx.async_eval(array)
    return array


def run_on_other_thread(call: Callable[[], Any]) -> Any:
    """The result of `call` on another thread.

    On the main thread, MLX's CPU tells of errors when operations are enqueued.
    """
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(call).result()


def test_numpy_conversion_hides_device_error():
    """Why there is `read`: if this fails, numpy or MLX has been mended."""
    assert run_on_other_thread(lambda: np.array(failing())).shape == (1,)


@pytest.mark.parametrize("reading", [to_numpy, share])
def test_failed_array_read_raises_its_error(reading: Callable[[mx.array], Any]):
    with pytest.raises(RuntimeError):
        run_on_other_thread(lambda: reading(failing()))


def test_array_read_copies_and_share_shares_values():
    array = mx.array([1.0, 2.0])
    copy, own = to_numpy(array), share(array)
    own += 1
    assert copy.tolist() == [1.0, 2.0]
    assert array.tolist() == [2.0, 3.0]
