"""Every rank but 0: runs rank 0's plans on its shard of the model."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NoReturn

from vlm_server.errors import EngineBroken, ModelLoadError
from vlm_server.protocol.commands import Rank
from vlm_server.runner.decode.speculation import speculation_of
from vlm_server.runner.device.device import Device
from vlm_server.runner.distributed.connection import RankZeroConnection
from vlm_server.runner.distributed.messages import (
    Clear,
    Drafts,
    Hello,
    Join,
    Limit,
    Load,
    Loaded,
    NotLoaded,
    PrecompileNext,
    RankPlan,
    Serve,
    SetLimit,
    Stored,
)
from vlm_server.runner.distributed.prefixes import FollowerPrefixes
from vlm_server.runner.distributed.speculation import FollowerSpeculation
from vlm_server.runner.fingerprint import program_digest
from vlm_server.runner.loading.load import load
from vlm_server.runner.memory import MlxMemory
from vlm_server.runner.model_runner import ModelRunner
from vlm_server.runner.ranks import Ranks, fingerprint_of

logger = logging.getLogger(__name__)


def follow(rank: Rank, device: Device) -> NoReturn:
    """Load and serve until rank 0 ends, which ends this process.

    Raises EngineBroken if a step fails here, and ModelLoadError, which is also sent to rank 0.
    """
    hello = Hello(rank.number, device.suitable_bytes, device.kind.value, program_digest())
    rank_zero = RankZeroConnection.find(rank)
    rank_zero.send(hello)
    rank_zero.expect(Join)
    ranks = Ranks.join(rank)
    memory = MlxMemory(rank_zero.expect(Limit).memory, device)
    model = rank_zero.expect(Load).model
    try:
        loaded = load(model, device, memory.limit_bytes, ranks)
        rank_zero.send(Loaded(fingerprint_of(loaded.checkpoint)))
    except ModelLoadError as error:
        rank_zero.send(NotLoaded(str(error)))
        raise
    serve = rank_zero.expect(Serve)
    loaded = replace(loaded, kv_storage=serve.kv_storage.running)
    own = speculation_of(loaded, serve.num_draft_tokens)
    prefixes = FollowerPrefixes(lambda: rank_zero.expect(Stored), serve.kv_storage)
    speculation = FollowerSpeculation(own, lambda: rank_zero.expect(Drafts))
    runner = ModelRunner(loaded, prefixes, speculation)
    while True:
        match rank_zero.receive():
            case RankPlan() as plan:
                prefixes.drop(plan.dropped)
                result = runner.launch(prefixes.plan_of(plan)).result()
                if result.error is not None:
                    raise EngineBroken(f"a step failed on rank {ranks.rank}: {result.error}")
            case PrecompileNext():
                runner.precompile_next()
            case SetLimit(limit_bytes):
                memory.set_limit(limit_bytes)
            case Clear(dropped):
                prefixes.drop(dropped)
                memory.clear()
            case other:
                raise EngineBroken(f"rank 0 sent {type(other).__name__} between two plans")
