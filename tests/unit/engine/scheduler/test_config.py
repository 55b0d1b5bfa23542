"""How many sequences suit the memory, where the settings name no number."""

from __future__ import annotations

import pytest

from vlm_server.engine.scheduler.config import suitable_num_seqs

MIB = 1 << 20


@pytest.mark.parametrize(
    ("free", "one", "suitable"),
    [
        (2000, 10, 100),
        (2019, 10, 100),
        (100, 10, 16),  # shorter ones may fit: admission knows
        (-100, 10, 16),
        (100_000, 10, 256),
        (2000, 0, 256),  # a state that takes nothing
    ],
)
def test_default_max_num_seqs_fills_half_of_memory(free: int, one: int, suitable: int) -> None:
    assert suitable_num_seqs(free * MIB, one * MIB) == suitable
