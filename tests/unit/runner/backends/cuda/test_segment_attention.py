"""Division of segment attention into blocks; its numbers are tested on a GPU."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from vlm_server.runner.backends.cuda.kernels import blocks_of


@pytest.mark.parametrize(
    "segments", [[(3, 64), (2, 48), (1, 12)], [(1, 4)], [(2, 300), (1, 65)], [(1, 4524)]], ids=str
)
def test_segment_blocks_contain_every_patch_once_with_its_segment(segments: list[tuple[int, int]]):
    blocks = blocks_of(segments)
    lengths = [length for count, length in segments for _ in range(count)]
    ends = np.cumsum(lengths).tolist()
    bounds = list(pairwise([0, *ends]))
    first_queries = blocks[:, 0].tolist()
    for (query, start, end), after in zip(
        blocks.tolist(), [*first_queries[1:], ends[-1]], strict=True
    ):
        assert (start, end) in bounds
        assert start <= query < after <= end
        assert after - query <= 64
    assert first_queries[0] == 0
