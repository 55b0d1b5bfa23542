"""Times MLX's quantized product of the same rows as (rows, depth) and as (rows, 1, depth).

On CUDA the second reads all weights once per row.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx

_COLUMNS, _DEPTH, _CALLS = 11008, 2048, 20


def main() -> None:
    packed, scales, biases = mx.quantize(
        mx.random.normal((_COLUMNS, _DEPTH)).astype(mx.bfloat16), group_size=64, bits=4
    )
    for rows in (1, 8, 16, 128, 640):
        x = mx.random.normal((rows, _DEPTH)).astype(mx.bfloat16)
        times = [
            _milliseconds(
                lambda x=x: mx.quantized_matmul(  # type: ignore[misc]
                    x, packed, scales, biases, transpose=True, group_size=64, bits=4
                )
            )
            for x in (x, x[:, None])
        ]
        print(f"{rows:4} rows: {times[0]:7.3f} ms, as rows of one {times[1]:7.3f} ms")


def _milliseconds(call: Callable[[], mx.array]) -> float:
    mx.eval(call())
    start = time.perf_counter()
    for _ in range(_CALLS):
        mx.async_eval(call())
    mx.synchronize()
    return (time.perf_counter() - start) / _CALLS * 1000


if __name__ == "__main__":
    main()
