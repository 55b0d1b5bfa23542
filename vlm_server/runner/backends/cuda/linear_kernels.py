"""Our CUDA kernels of linear layers and experts, dense or quantized, as functions of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from vlm_server.runner.backends.cuda import source

DTYPES = (mx.bfloat16, mx.float16)
"""Types of inputs and outputs."""
SKINNY_ROWS = 32
"""Maximum rows of `skinny_linear`."""
SKINNY_DEPTH = 64  # and its multiples
_SKINNY_COLUMNS = 16
_SKINNY_WARPS = 8
_EXPERT_ROWS, _EXPERT_COLUMNS, _EXPERT_THREADS = 64, 128, 256
"""Of a block of `expert_rows`: rows and columns of its tiles, and threads."""
_SPREAD = 4
"""How many times as many tiles as an expert has on average are multiplied at the same time."""


@dataclass(frozen=True, slots=True)
class Packing:
    """What a quantized weight is packed with: `weight = scales * number + offsets` in each group.

    scales, offsets: (columns, depth / group_size), in the type of the inputs.
    """

    scales: mx.array
    offsets: mx.array
    bits: int
    group_size: int

    @property
    def is_taken(self) -> bool:
        """Whether our kernels take it."""
        return self.bits in (4, 8) and self.group_size in (32, 64, 128)


def skinny_linear(
    x: mx.array,
    weight: mx.array,
    bias: mx.array | None,
    widths: Sequence[int],
    packing: Packing | None = None,
) -> list[mx.array]:
    """`x @ weight.T + bias` for (..., depth) and (columns, depth): see skinny_linear.cu.

    In parts, (..., width) each; `widths` add up to all columns. `packing`: of a quantized weight.
    """
    columns, none = weight.shape[0], weight if packing is None else packing.scales
    packed = [] if packing is None else [packing.scales, packing.offsets]
    sort = None if packing is None else (packing.bits, packing.group_size)
    output: list[mx.array] = _skinny_linear(tuple(widths), sort)(
        inputs=[weight, *packed, x, none if bias is None else bias],
        template=[("T", x.dtype)],
        grid=(-(-columns // _SKINNY_COLUMNS) * _SKINNY_WARPS * source.WARP, 1, 1),
        threadgroup=(_SKINNY_WARPS * source.WARP, 1, 1),
        output_shapes=[(*x.shape[:-1], width) for width in widths],
        output_dtypes=[x.dtype] * len(widths),
    )
    return output


def expert_rows(
    x: mx.array,
    weight: mx.array,
    bias: mx.array | None,
    experts: mx.array,
    packing: Packing | None = None,
) -> mx.array:
    """`x @ weight[expert].T + bias[expert]`, (rows, columns), by the expert of each row.

    x: (rows, depth). weight: (experts, columns, depth), or packed. bias: (experts, columns).
    experts: (rows,) uint32, in ascending order. See expert_rows.cu.
    """
    num_experts, columns = weight.shape[:2]
    packed = [] if packing is None else [packing.scales, packing.offsets]
    added = [] if bias is None else [bias]
    sort = None if packing is None else (packing.bits, packing.group_size)
    tiles = -(-_SPREAD * x.shape[0] // (num_experts * _EXPERT_ROWS))
    blocks = -(-columns // _EXPERT_COLUMNS)
    output: mx.array = _expert_rows(sort, has_bias=bool(added))(
        inputs=[weight, *packed, x, experts, *added],
        template=[("T", x.dtype)],
        grid=(blocks * _EXPERT_THREADS, num_experts, tiles),
        threadgroup=(_EXPERT_THREADS, 1, 1),
        output_shapes=[(x.shape[0], columns)],
        output_dtypes=[x.dtype],
    )[0]
    return output


@cache
def _skinny_linear(widths: tuple[int, ...], packing: tuple[int, int] | None) -> Any:
    """For any number of columns if they are one part. `packing`: bits and group size."""
    is_one = len(widths) == 1
    outputs = [f"y_{number}" for number in range(len(widths))]
    columns = "weight_shape[0]" if is_one else _joined(widths)
    name, inputs, none = "skinny_linear", ["weight", "x", "bias"], "weight"
    if packing is not None:
        name, none = f"{name}_{_joined(packing, '_')}", "scales"
        inputs[1:1] = ["scales", "offsets"]
    return source.kernel(
        name if is_one else f"{name}_of_{_joined(widths, '_')}",
        inputs,
        outputs,
        "int num_rows = 1; for (int i = 0; i + 1 < x_ndim; i++) num_rows *= x_shape[i];"
        f"const Output<T, {len(widths)}> y{{{{{_joined(outputs)}}}, {{{columns}}}}};"
        f"{_weights(packing)} skinny_linear(w, x, bias == {none} ? (const T*)nullptr : bias, y,"
        " num_rows, weight_shape[0], x_shape[x_ndim - 1]);",
        ["mma.cuh", "weights.cuh", "skinny_linear.cu"],
        shared_memory=_SKINNY_WARPS * SKINNY_ROWS * _SKINNY_COLUMNS * 4,
        is_strided=False,
    )


@cache
def _expert_rows(packing: tuple[int, int] | None, *, has_bias: bool) -> Any:
    """`packing`: bits and group size."""
    name, inputs, bias = "expert_rows", ["weight", "x", "experts"], "(const T*)nullptr"
    if packing is not None:
        name = f"{name}_{_joined(packing, '_')}"
        inputs[1:1] = ["scales", "offsets"]
    if has_bias:
        name, bias = f"{name}_biased", "bias"
        inputs.append("bias")
    return source.kernel(
        name,
        inputs,
        ["y"],
        f"{_weights(packing)} expert_rows(w, x, experts, {bias}, y, x_shape[0], weight_shape[1],"
        " x_shape[1]);",
        ["mma.cuh", "weights.cuh", "expert_rows.cu"],
        is_strided=False,
    )


def _weights(packing: tuple[int, int] | None) -> str:
    """See weights.cuh."""
    if packing is None:
        return "const Dense<T> w{weight};"
    return f"const Quantized<T, {_joined(packing)}> w{{weight, scales, offsets}};"


def _joined(values: Sequence[object], separator: str = ", ") -> str:
    return separator.join(map(str, values))
