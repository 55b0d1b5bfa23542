"""Rearranges rows of a layer's KV, as sequences join, leave and move within a batch.

On CUDA, one kernel of ours moves keys and values: launching MLX's eight kernels for each layer took
most of the 7 ms that a joining sequence added to a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from vlm_server.runner.backends.cuda import kernels

KeysAndValues = tuple[mx.array, mx.array]
"""Keys and values of one layer, each (rows, heads, capacity, head size)."""


@dataclass(frozen=True, slots=True)
class Run:
    """A copy of `count` columns from `start` to `to`, of `num_rows` rows from `row` on."""

    row: int
    num_rows: int
    start: int
    count: int
    to: int = 0
    source: int = 0


def arrange(sources: Sequence[KeysAndValues], runs: Sequence[Run], capacity: int) -> KeysAndValues:
    """New arrays with the rows of `runs` of one or two sources, and `capacity` columns.

    Columns outside runs are zeros or unused columns of a source.
    """
    if kernels.takes_rows(sources):
        return kernels.arrange_rows(sources, _places(tuple(runs), capacity), capacity)
    keys, values = zip(*sources, strict=True)
    return _arrange(keys, runs, capacity), _arrange(values, runs, capacity)


@lru_cache(maxsize=8)
def _places(runs: tuple[Run, ...], capacity: int) -> mx.array:
    """The runs as the kernel's argument, (rows, 6); the same for all layers."""
    return mx.array(
        [
            [run.source, run.row + i, run.start, run.count, run.to, capacity]
            for run in runs
            for i in range(run.num_rows)
        ],
        dtype=mx.int32,
    )


def _arrange(sources: Sequence[mx.array], runs: Sequence[Run], capacity: int) -> mx.array:
    """Each run is copied into its place at once: padded pieces would take as much memory again."""
    columns = [_columns(sources[run.source], run) for run in runs]
    if len(runs) == 1 and runs[0].count == capacity:
        return mx.contiguous(columns[0])
    _, heads, _, size = columns[0].shape
    num_rows = sum(run.num_rows for run in runs)
    arranged, row = mx.zeros((num_rows, heads, capacity, size), columns[0].dtype), 0
    for run, part in zip(runs, columns, strict=True):
        arranged[row : row + run.num_rows, :, run.to : run.to + run.count] = part
        row += run.num_rows
    return arranged


def _columns(array: mx.array, run: Run) -> mx.array:
    return array[run.row : run.row + run.num_rows, :, run.start : run.start + run.count]
