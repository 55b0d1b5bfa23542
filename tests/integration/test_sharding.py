"""A model that is split over two processes answers as a whole one, also in compiled steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.integration.test_compiled_model import CANT_BE_COMPILED
from tests.integration.two_ranks import Comparison
from tests.support.ports import free_ports
from tests.tiny_models import build
from vlm_server import settings
from vlm_server.protocol.commands import Rank
from vlm_server.runner.families.table import FAMILIES as TABLE
from vlm_server.supervisor.engine_process.ranks import Host, Hostfile, ranks_of

OF_MLX_VLM = ("qwen3_vl_moe", "internvl")
"""Families that mlx-vlm shards itself, by the `shard` of the model or its language model."""
FAMILIES = (*sorted({row.name for row in TABLE.values() if row.is_shardable}), *OF_MLX_VLM)
SECONDS = 240.0


# One fixture loads all families into both ranks.
pytestmark = [pytest.mark.whole, pytest.mark.xdist_group("sharding")]


@pytest.fixture(scope="module")
def comparisons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Comparison]:
    """By family."""
    folder = tmp_path_factory.mktemp("models")
    models = [str(build(family, folder / family)) for family in FAMILIES]
    host = Host("127.0.0.1", ("127.0.0.1",))
    ranks = ranks_of(Hostfile((host, host), "ring"), free_ports(3), settings.Log())
    processes = [start(rank, models) for rank in ranks]
    said, _ = processes[0].communicate(timeout=SECONDS)
    assert [process.wait(SECONDS) for process in processes] == [0, 0]
    lines = [line for line in said.splitlines() if line.startswith(b"{")]
    found = [msgspec.json.decode(line, type=Comparison) for line in lines]
    return {comparison.name: comparison for comparison in found}


def start(rank: Rank, models: list[str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.two_ranks", *models],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if rank.number == 0 else None,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(rank) + b"\n")
    process.stdin.flush()
    return process


@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_model_logits_equal_whole_models(comparisons: dict[str, Comparison], family: str):
    comparison = comparisons[family]
    assert comparison.largest > 0.1
    assert comparison.difference < 1e-4 * comparison.largest


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in CANT_BE_COMPILED])
def test_compiled_steps_of_sharded_model_answer_as_whole_model(
    comparisons: dict[str, Comparison], family: str
):
    comparison = comparisons[family]
    assert len(comparison.whole_tokens["second"]) == 4
    assert comparison.compiled_tokens == comparison.whole_tokens
