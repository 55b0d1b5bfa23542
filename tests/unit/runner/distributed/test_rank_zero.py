"""Rank 0 accepts only ranks that compute the same tensors, and sends them what it clears."""

from __future__ import annotations

import shutil
import threading
from contextlib import nullcontext
from multiprocessing import Pipe
from pathlib import Path
from queue import SimpleQueue

import mlx.core as mx
import pytest

from tests.support.ports import free_ports
from tests.tiny_models import build
from vlm_server import settings
from vlm_server.errors import ModelLoadError
from vlm_server.protocol import Start
from vlm_server.protocol.commands import Rank
from vlm_server.runner.device.device import current_device
from vlm_server.runner.distributed import messages
from vlm_server.runner.distributed.connection import Followers, RankZeroConnection
from vlm_server.runner.distributed.messages import Clear, Hello, Loaded
from vlm_server.runner.distributed.prefixes import NumberedSegment, SegmentLog
from vlm_server.runner.distributed.rank_zero import RankZero, RankZeroMemory
from vlm_server.runner.fingerprint import Checkpoint, program_digest
from vlm_server.runner.kv.segments import KVSegment
from vlm_server.runner.ranks import Ranks, fingerprint_of

KIND = current_device().kind.value


@pytest.mark.parametrize(
    ("kind", "program", "reason"),
    [
        (KIND, "another", "rank 1 has another version of vlm-server, mlx or mlx-vlm"),
        ("another", program_digest(), "rank 1 computes on another"),
    ],
    ids=["program", "device"],
)
def test_rank_with_different_program_or_device_is_refused(kind: str, program: str, reason: str):
    rank = Rank(0, 2, "ring", {}, {}, "127.0.0.1", free_ports(1), "secret", settings.Log())
    ends = SimpleQueue[int]()

    def come() -> None:
        RankZeroConnection.find(rank, ends.put).send(Hello(1, 1 << 30, kind, program))

    threading.Thread(target=come, daemon=True).start()
    with pytest.raises(ModelLoadError, match=reason):
        RankZero.connect(rank, current_device())
    assert ends.get(timeout=10) == 0


def test_rank_with_other_weights_is_refused(tmp_path: Path):
    """Of the same names, shapes and sizes: nothing but their content tells."""
    model = build("qwen3_vl", tmp_path / "model")
    other = shutil.copytree(model, tmp_path / "other")
    with (other / "model.safetensors").open("r+b") as file:
        file.seek((other / "model.safetensors").stat().st_size // 2)
        file.write(b"\x01\x02")
    for folder, is_same in ((model, True), (other, False)):
        ours, theirs = Pipe()
        told = fingerprint_of(Checkpoint(folder, "auto"))
        theirs.send_bytes(messages.encode(Loaded(told)))
        rank_zero = RankZero(Ranks(mx.distributed.init()), Followers([ours], []))
        refused = pytest.raises(ModelLoadError, match="rank 1 has another checkpoint")
        with nullcontext() if is_same else refused:
            start = Start(
                settings.ModelSettings(path=str(model)),
                settings.SchedulerSettings(),
                settings.EngineSettings(),
                settings.Log(),
            )
            rank_zero.load(start, current_device(), 1 << 30)


def test_clear_frees_dropped_segments_on_all_ranks():
    """No plan follows the clear."""
    ours, theirs = Pipe()
    log = SegmentLog()
    memory = RankZeroMemory(settings.MemorySettings(), current_device(), Followers([ours], []), log)
    segment = NumberedSegment(log, KVSegment(()))
    memory.clear()
    number = segment.number
    del segment
    memory.clear()
    cleared = [messages.decode_message(theirs.recv_bytes()) for _ in range(2)]
    assert cleared == [Clear(()), Clear((number,))]
