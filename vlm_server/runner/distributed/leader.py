"""Rank 0: the engine's runner and memory, of which the other ranks are told."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from vlm_server.cache.caches import Caches
from vlm_server.errors import EngineBroken, ModelLoadError
from vlm_server.interfaces import PreparedPrompt, Runner, SchedulerOutput, Step, StepResult
from vlm_server.protocol import Start
from vlm_server.protocol.commands import Rank
from vlm_server.runner.device.device import Device
from vlm_server.runner.device.memory import MlxMemory
from vlm_server.runner.distributed.connection import Followers
from vlm_server.runner.distributed.messages import (
    Clear,
    Hello,
    Join,
    Limit,
    Load,
    Loaded,
    NotLoaded,
    PlanAhead,
    Serve,
    SetLimit,
)
from vlm_server.runner.distributed.plans import message_of
from vlm_server.runner.distributed.prefixes import Book, LeadingPrefixes
from vlm_server.runner.fingerprint import program_digest
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.loading.load import load
from vlm_server.runner.model_runner import ModelRunner
from vlm_server.runner.ranks import Ranks, fingerprint_of
from vlm_server.settings import Memory, Model

logger = logging.getLogger(__name__)


class Leading:
    """The `Group` of rank 0."""

    def __init__(self, ranks: Ranks, followers: Followers) -> None:
        self._ranks = ranks
        self._followers = followers
        self._book = Book()

    @classmethod
    def meet(cls, rank: Rank, device: Device) -> Leading:
        """Wait for all ranks. Raises ModelLoadError if they can't be reached, or compute otherwise.

        MLX connects them once all are here: a process that waits in it can notice nothing else.
        """
        followers = Followers.accept(rank)
        _check_alike(followers.hellos, device)
        followers.send(Join())
        met = cls(Ranks.join(rank), followers)
        logger.info("the model is split over %d processes (%s)", rank.size, rank.backend)
        return met

    def common(self, start: Start, device: Device) -> Start:
        """With the memory of the smallest rank, and without what ranks can't do alike.

        Drafts depend on measured times; prompts that fail in one call are done again one by one;
        and the disk would have the KV of this rank's heads alone.
        """
        others = [hello.suitable_bytes for hello in self._followers.hellos]
        limit = start.memory.limit_on(device.memory_bytes) or min(device.suitable_bytes, *others)
        return msgspec.structs.replace(
            start,
            memory=msgspec.structs.replace(start.memory, limit_bytes=limit),
            cache=msgspec.structs.replace(start.cache, disk_bytes=0),
            scheduler=msgspec.structs.replace(
                start.scheduler, num_speculative_tokens=0, max_prompts_per_prefill=1
            ),
        )

    def memory(self, settings: Memory, device: Device) -> MlxMemory:
        """The others clear theirs when this rank does."""
        self._followers.send(Limit(settings))
        return LeadingMemory(settings, device, self._followers, self._book)

    def load(self, settings: Model, device: Device, limit_bytes: int) -> LoadedModel:
        """This rank's part; meanwhile the others load theirs. Raises ModelLoadError for any."""
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
        """What does the plans here, and has them done by the others."""
        prefixes = LeadingPrefixes(caches, self._followers.send, self._book)
        self._followers.send(Serve(prefixes.stores_prefixes))
        self._followers.watch()
        runner = ModelRunner(loaded, prefixes, num_draft_tokens)
        return LeadingRunner(runner, self._book, self._followers)


def _check_alike(hellos: Sequence[Hello], device: Device) -> None:
    """Raises ModelLoadError if a rank would make other tensors of the same plan."""
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


class LeadingMemory(MlxMemory):
    """The `DeviceMemory` of rank 0; the others clear when it does."""

    def __init__(self, settings: Memory, device: Device, followers: Followers, book: Book) -> None:
        self._book = book
        self._followers: Followers | None = None  # they set the first limit themselves
        super().__init__(settings, device)
        self._followers = followers

    def set_limit(self, limit_bytes: int) -> None:
        super().set_limit(limit_bytes)
        if self._followers is not None:
            self._followers.send(SetLimit(limit_bytes))

    def clear(self) -> None:
        if self._followers is not None:
            self._followers.send(Clear(self._book.take_dropped()))
        super().clear()


class LeadingRunner:
    """The `Runner` of rank 0: tells the others each plan before it begins with it itself."""

    def __init__(self, runner: Runner, book: Book, followers: Followers) -> None:
        self._runner = runner
        self._book = book
        self._followers = followers

    @property
    def num_tracked(self) -> int:
        """See `Runner`."""
        return self._runner.num_tracked

    def kv_bytes(self, num_tokens: int) -> int:
        """See `Runner`; of each rank."""
        return self._runner.kv_bytes(num_tokens)

    def launch(self, plan: SchedulerOutput) -> Step:
        """See `Runner`. Raises EngineBroken if a rank is gone."""
        self._followers.send(message_of(plan, self._book.take_dropped()))
        return LeadingStep(self._runner.launch(plan))

    def tokens_beside(self, prompt: PreparedPrompt, num_seqs: int) -> int:
        """See `Runner`."""
        return self._runner.tokens_beside(prompt, num_seqs)

    def settle(self) -> None:
        """See `Runner`."""
        self._runner.settle()

    def plan_ahead(self) -> bool:
        """See `Runner`."""
        has_planned = self._runner.plan_ahead()
        if has_planned:
            self._followers.send(PlanAhead())
        return has_planned


@dataclass(frozen=True, slots=True)
class LeadingStep:
    """A step of all ranks."""

    step: Step

    def result(self) -> StepResult:
        """What it brings. Raises EngineBroken if the device failed here.

        The other ranks do not know of that, so they would go on with what this one dropped.
        """
        result = self.step.result()
        if result.error is not None:
            raise EngineBroken(f"a step of several ranks failed: {result.error}")
        return result
