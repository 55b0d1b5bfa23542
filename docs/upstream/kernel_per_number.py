"""MLX compiles a kernel for each value of a one-element array: the second takes seconds more.

python kernel_per_number.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import mlx.core as mx

WEIGHTS = mx.random.normal((64, 64))


def compiled(factors: Sequence[mx.array]) -> Callable[[mx.array], mx.array]:
    """Layers that differ in their factors alone."""

    def layers(x: mx.array) -> mx.array:
        for factor in factors:
            x = ((x + mx.exp(x)) * factor) @ WEIGHTS
        return x

    return mx.compile(layers)


def seconds(factors: Sequence[mx.array]) -> float:
    """Seconds of the first call."""
    mx.eval(factors, WEIGHTS)
    begun = time.perf_counter()
    mx.eval(compiled(factors)(mx.ones((4, 64))))
    return time.perf_counter() - begun


print(f"8 factors as vectors: {seconds([mx.full((64,), 1.0 + i) for i in range(8)]):.1f} s")
print(f"8 factors of one number: {seconds([mx.full((1,), 2.0 + i) for i in range(8)]):.1f} s")
