"""Rank 0 takes only ranks that make the same tensors of a plan, and tells them what it clears."""

from __future__ import annotations

import threading
from multiprocessing import Pipe
from queue import SimpleQueue

import pytest

from tests.ports import free_ports
from vlm_server import settings
from vlm_server.errors import ModelLoadError
from vlm_server.protocol.ranks import Rank
from vlm_server.runner.device.device import current_device
from vlm_server.runner.distributed import messages
from vlm_server.runner.distributed.connection import Followers, Leader
from vlm_server.runner.distributed.leader import Leading, LeadingMemory
from vlm_server.runner.distributed.messages import Clear, Hello
from vlm_server.runner.distributed.prefixes import Book, NumberedSegment
from vlm_server.runner.kv.segments import KVSegment
from vlm_server.runner.model.checkpoint.fingerprint import program_digest

KIND = current_device().kind.value


@pytest.mark.parametrize(
    ("kind", "program", "reason"),
    [
        (KIND, "another", "rank 1 has another version of vlm-server, mlx or mlx-vlm"),
        ("another", program_digest(), "rank 1 computes on another"),
    ],
    ids=["program", "device"],
)
def test_a_rank_that_computes_otherwise_is_refused(kind: str, program: str, reason: str):
    rank = Rank(0, 2, "ring", {}, {}, "127.0.0.1", free_ports(1), "secret", settings.Log())
    ends = SimpleQueue[int]()

    def come() -> None:
        Leader.find(rank, ends.put).send(Hello(1, 1 << 30, kind, program))

    threading.Thread(target=come, daemon=True).start()
    with pytest.raises(ModelLoadError, match=reason):
        Leading.meet(rank, current_device())
    assert ends.get(timeout=10) == 0


def test_what_is_cleared_is_free_on_all_ranks():
    """Without a plan after it."""
    ours, theirs = Pipe()
    book = Book()
    memory = LeadingMemory(settings.Memory(), current_device(), Followers([ours], []), book)
    segment = NumberedSegment(book, KVSegment(()))
    memory.clear()
    number = segment.number
    del segment
    memory.clear()
    cleared = [messages.decode_message(theirs.recv_bytes()) for _ in range(2)]
    assert cleared == [Clear(()), Clear((number,))]
