"""How an engine is built: in a single process, or on rank 0, which directs the other ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from vlm_server.cache.caches import Caches
from vlm_server.errors import EngineBroken, ModelLoadError
from vlm_server.interfaces import Runner, SchedulerOutput, StepResult
from vlm_server.protocol import Start
from vlm_server.protocol.commands import Rank
from vlm_server.runner.decode.speculation import Speculation, speculation_of
from vlm_server.runner.device.device import Device
from vlm_server.runner.distributed.connection import Followers
from vlm_server.runner.distributed.messages import (
    Clear,
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
)
from vlm_server.runner.distributed.prefixes import RankZeroPrefixes, SegmentLog
from vlm_server.runner.distributed.speculation import RankZeroSpeculation
from vlm_server.runner.embedding_runner import EmbeddingRunner
from vlm_server.runner.fingerprint import program_digest
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.loading.load import load
from vlm_server.runner.memory import MlxMemory
from vlm_server.runner.model_runner import LaunchedStep, ModelRunner
from vlm_server.runner.ranks import Ranks, fingerprint_of
from vlm_server.settings import OFF, MemorySettings

logger = logging.getLogger(__name__)


class SingleProcess:
    """How an engine is built in one process; its methods are called in the order of definition.

    `RankZero` overrides them for several ranks.
    """

    def harmonize_settings(self, start: Start, device: Device) -> Start:
        """`start` with settings that suit all ranks."""
        return start

    def memory(self, settings: MemorySettings, device: Device) -> MlxMemory:
        """This process's device memory."""
        return MlxMemory(settings, device)

    def load(self, start: Start, device: Device, limit_bytes: int) -> LoadedModel:
        """The model, or this rank's shard of it. Raises ModelLoadError."""
        model = start.model
        if not start.scheduler.num_speculative_tokens:
            model = msgspec.structs.replace(model, drafter=OFF)
        return load(model, device, limit_bytes, adapters=start.adapters)

    def runner(self, loaded: LoadedModel, caches: Caches, num_draft_tokens: int) -> Runner:
        """The runner of the engine's plans."""
        if loaded.family.embeds is not None:
            return EmbeddingRunner(loaded)
        return ModelRunner(loaded, caches, speculation_of(loaded, num_draft_tokens))


class RankZero(SingleProcess):
    """How an engine is built on rank 0, with the ranks that follow it."""

    def __init__(self, ranks: Ranks, followers: Followers) -> None:
        self._ranks = ranks
        self._followers = followers
        self._log = SegmentLog()

    @classmethod
    def connect(cls, rank: Rank, device: Device) -> RankZero:
        """Wait for all ranks. Raises ModelLoadError if they can't be reached, or differ.

        MLX connects them only once all have arrived: a wait in MLX can't be interrupted.
        """
        followers = Followers.accept(rank)
        _check_alike(followers.hellos, device)
        followers.send(Join())
        connected = cls(Ranks.join(rank), followers)
        logger.info("the model is split over %d processes (%s)", rank.size, rank.backend)
        return connected

    def harmonize_settings(self, start: Start, device: Device) -> Start:
        """`start` with the smallest rank's memory, without batched prefills and the disk.

        Batched prefills that fail are repeated one by one, and the disk would hold the KV of this
        rank's heads alone.
        """
        follower_bytes = [hello.suitable_bytes for hello in self._followers.hellos]
        limit = start.memory.limit_on(device.memory_bytes) or min(
            device.suitable_bytes, *follower_bytes
        )
        return msgspec.structs.replace(
            start,
            memory=msgspec.structs.replace(start.memory, max_bytes=limit),
            cache=msgspec.structs.replace(start.cache, max_disk_bytes=0),
            scheduler=msgspec.structs.replace(start.scheduler, max_prompts_per_prefill=1),
        )

    def memory(self, settings: MemorySettings, device: Device) -> MlxMemory:
        """This rank's memory; the others follow its limit and clear with it."""
        self._followers.send(Limit(settings))
        return RankZeroMemory(settings, device, self._followers, self._log)

    def load(self, start: Start, device: Device, limit_bytes: int) -> LoadedModel:
        """This rank's shard of the model. Raises ModelLoadError if any rank fails."""
        settings = start.model
        self._followers.send(Load(settings))
        loaded = load(settings, device, limit_bytes, self._ranks)
        fingerprint = fingerprint_of(loaded.checkpoint)
        for number, answer in enumerate(self._followers.answers(), start=1):
            if isinstance(answer, NotLoaded):
                raise ModelLoadError(f"rank {number}: {answer.reason}")
            if not isinstance(answer, Loaded) or answer.fingerprint != fingerprint:
                raise ModelLoadError(f"rank {number} has another checkpoint in {settings.path}")
        return loaded

    def runner(self, loaded: LoadedModel, caches: Caches, num_draft_tokens: int) -> Runner:
        """This rank's runner, which sends its plans to the others."""
        prefixes = RankZeroPrefixes(caches, self._followers.send, self._log)
        own = speculation_of(loaded, num_draft_tokens)
        speculation = RankZeroSpeculation(own, self._followers.send)
        self._followers.send(Serve(num_draft_tokens, caches.kv_storage))
        self._followers.watch()
        return RankZeroRunner(loaded, prefixes, speculation, self._log, self._followers)


def _check_alike(hellos: Sequence[Hello], device: Device) -> None:
    """Raises ModelLoadError if ranks differ in program or kind of device."""
    program = program_digest()
    for hello in hellos:
        if hello.kind != device.kind.value:
            raise ModelLoadError(
                f"rank {hello.rank} computes on {hello.kind}, and this machine on "
                f"{device.kind.value}: all must be of one kind"
            )
        if hello.program != program:
            raise ModelLoadError(
                f"rank {hello.rank} has another version of vlm-server, mlx or mlx-vlm: install the "
                "same on all machines"
            )


class RankZeroMemory(MlxMemory):
    """The `DeviceMemory` of rank 0, which the others follow."""

    def __init__(
        self, settings: MemorySettings, device: Device, followers: Followers, log: SegmentLog
    ) -> None:
        super().__init__(settings, device)
        self._log = log
        self._followers = followers

    def set_limit(self, limit_bytes: int) -> None:
        super().set_limit(limit_bytes)
        self._followers.send(SetLimit(limit_bytes))

    def clear(self) -> None:
        self._followers.send(Clear(self._log.take_dropped()))
        super().clear()


class RankZeroRunner(ModelRunner):
    """The `Runner` of rank 0, which sends each plan to the others before launching it.

    `kv_bytes` are those of each rank.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prefixes: RankZeroPrefixes,
        speculation: Speculation,
        log: SegmentLog,
        followers: Followers,
    ) -> None:
        super().__init__(loaded, prefixes, speculation)
        self._log = log
        self._followers = followers

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        """Raises EngineBroken if a rank is gone."""
        self._followers.send(RankPlan.of(plan, self._log.take_dropped()))
        return super().launch(plan)

    def finish(self, step: LaunchedStep) -> StepResult:
        """Raises EngineBroken if the device failed here.

        The other ranks do not notice, and would keep the requests that this one dropped.
        """
        result = super().finish(step)
        if result.error is not None:
            raise EngineBroken(f"a step of several ranks failed: {result.error}")
        return result

    def precompile_next(self) -> bool:
        """See `Runner`. All ranks do it together, as steps have sums over all of them."""
        self._followers.send(PrecompileNext())
        return super().precompile_next()
