"""Times the first quantized product of each number of rows, in a new process.

On CUDA the first products of 32 and of 33 rows compile for half a minute each.
"""

from __future__ import annotations

import time

import mlx.core as mx

_COLUMNS, _DEPTH = 11008, 2048


def main() -> None:
    packed, scales, biases = mx.quantize(
        mx.random.normal((_COLUMNS, _DEPTH)).astype(mx.bfloat16), group_size=64, bits=4
    )
    for rows in (1, 16, 32, 33, 128):
        x = mx.random.normal((rows, _DEPTH)).astype(mx.bfloat16)
        mx.eval(x, packed, scales, biases)
        start = time.perf_counter()
        mx.eval(
            mx.quantized_matmul(x, packed, scales, biases, transpose=True, group_size=64, bits=4)
        )
        mx.synchronize()
        print(f"{rows:4} rows: {time.perf_counter() - start:6.2f} s")


if __name__ == "__main__":
    main()
