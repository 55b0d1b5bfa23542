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
    pieces = {run: _piece(sources[run.source], run, capacity) for run in dict.fromkeys(runs)}
    if len(runs) == 1:
        return mx.contiguous(pieces[runs[0]])
    return mx.concatenate([pieces[run] for run in runs])


def _piece(array: mx.array, run: Run, capacity: int) -> mx.array:
    rows = array[run.row : run.row + run.num_rows, :, run.start : run.start + run.count]
    num_after = capacity - run.to - run.count
    if run.to == num_after == 0:
        return rows
    return mx.pad(rows, [(0, 0), (0, 0), (run.to, num_after), (0, 0)])
