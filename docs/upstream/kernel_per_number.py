"""MLX compiles a kernel for each value of a one-element array: the second function takes seconds more.

    python kernel_per_number.py
"""

import time

import mlx.core as mx

WEIGHTS = mx.random.normal((64, 64))


def compiled(factors):
    def layers(x):
        for factor in factors:
            x = ((x + mx.exp(x)) * factor) @ WEIGHTS
        return x

    return mx.compile(layers)


def seconds(factors):
    mx.eval(factors, WEIGHTS)
    begun = time.perf_counter()
    mx.eval(compiled(factors)(mx.ones((4, 64))))
    return time.perf_counter() - begun


print(f"8 factors as vectors: {seconds([mx.full((64,), 1.0 + i) for i in range(8)]):.1f} s")
print(f"8 factors of one number: {seconds([mx.full((1,), 2.0 + i) for i in range(8)]):.1f} s")
