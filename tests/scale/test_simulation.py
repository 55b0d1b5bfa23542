"""Real clients and simulated ones send the same prompts and get the same cache hits."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from scripts.simulation import costs
from scripts.simulation.command import COSTS
from scripts.simulation.real import check
from scripts.simulation.workload import Workload
from tests.tiny_models import build

pytestmark = [
    pytest.mark.xdist_group("scale"),
    pytest.mark.skipif(
        not hasattr(os, "sched_setaffinity") or shutil.which("taskset") is None,
        reason="needs taskset",
    ),
]


def test_replayed_clients_have_simulations_prompts_and_hits(tmp_path: Path):
    model = build("qwen2_5_vl", tmp_path / "model")  # has the vocabulary of the measured request
    work = Workload(users=2, turns=3, width=112, height=112, think_seconds=0.3, seconds=6.0)
    known = costs.read(COSTS)
    measured = check.measure(model, 1, [work], prefix_bytes=0)
    (real,) = measured.rounds
    simulated = check.simulated(measured, work, real, known).asked
    simulated_requests = {(request.key, request.turn): request for request in simulated}
    both = [
        (request, simulated_requests[request.key, request.turn])
        for request in real.asked
        if (request.key, request.turn) in simulated_requests
    ]
    assert len(both) >= 6
    for found, expected in both:
        assert found.prompt_tokens == expected.prompt_tokens
        if found.turn:
            assert found.cached_tokens == expected.cached_tokens
        assert 0 < found.ttft < found.ended - found.sent
    assert real.daemon_seconds > 0
    assert "users" in check.table(check.compare(measured, known))
