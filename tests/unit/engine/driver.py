"""The real loop around a scripted runner, preparers and encoder, which finish when told to."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from tokenizers import Tokenizer

from tests.support.engine_loop import ImpatientQueue, step_until
from tests.unit.engine.fakes import (
    ByteDecoder,
    FakeMemory,
    FakeProcess,
    FakeRunner,
    config,
    features_of,
    header_pixels,
    outcome_of,
    prepared,
    submit,
)
from vlm_server.cache.caches import Caches, EncodedImage
from vlm_server.engine.inbox import DiskReadDone, EncodeDone, InboxMessage, PrepareDone
from vlm_server.engine.loop import EngineLoop
from vlm_server.engine.memory.admission import Admission
from vlm_server.engine.memory.governor import Governor
from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State
from vlm_server.engine.scheduler.scheduler import Scheduler
from vlm_server.errors import InternalError, RequestError
from vlm_server.interfaces import (
    DiskReadWork,
    EncodeWork,
    Prepared,
    PreparedPrompt,
    PrepareWork,
    SchedulerOutput,
)
from vlm_server.protocol import Abort, Drain, Event, Failed, Finished, Submit, Usage
from vlm_server.settings import MemorySettings


@dataclass
class ScriptedPreparers:
    """Preparer threads that are done when a test says so."""

    inbox: SimpleQueue[InboxMessage]
    works: dict[str, PrepareWork] = field(default_factory=dict)
    outcome: Callable[[Submit], Prepared] | None = outcome_of
    """The outcome of each preparation at once; None if the test finishes them."""
    use_disk: bool = True
    """Whether the preparation in progress uses the disk."""

    @property
    def num_tracked(self) -> int:
        return len(self.works)

    def start(self, work: PrepareWork) -> None:
        self.works[work.submit.request_id] = work
        if self.outcome is not None:
            self.finish(work.submit.request_id)

    def finish(self, request_id: str, outcome: Prepared | RequestError | None = None) -> None:
        work = self.works.pop(request_id)
        self.use_disk = work.use_disk
        if outcome is None:
            try:
                outcome = (self.outcome or outcome_of)(work.submit)
            except RequestError as error:
                outcome = error
            except RuntimeError:
                outcome = InternalError("The request could not be prepared.")
        self.inbox.put(PrepareDone(request_id, outcome))


@dataclass
class ScriptedEncoder:
    """An encoder thread that is done when a test says so; at once if `is_fast`."""

    inbox: SimpleQueue[InboxMessage]
    is_fast: bool = True
    works: Sequence[EncodeWork] = ()
    done: list[EncodeWork] = field(default_factory=list)
    calls: list[list[str]] = field(default_factory=list)
    """The request ids of each encode call."""
    seconds: Callable[[int], float | None] = float
    """The seconds of a call, by its number of images; see `EncodeDone`."""
    has_parts_left = False

    def advance_encode(self, *, is_alone: bool) -> None:
        pass

    @property
    def work(self) -> EncodeWork | None:
        """The first work in progress."""
        return self.works[0] if self.works else None

    def start(self, works: Sequence[EncodeWork]) -> None:
        assert not self.works, "one call at a time"
        assert works
        assert all(work.inputs for work in works), "its pixels are not there"
        assert len({work.size for work in works}) == 1
        self.works = works
        if self.is_fast:
            self.finish()

    def finish(self, *outcomes: EncodedImage | RequestError) -> None:
        """Finish the work in progress, with these outcomes if given."""
        works, self.works = self.works, ()
        assert works
        self.done += works
        self.calls.append([work.request_id for work in works])
        results = outcomes or tuple(features_of(work.span) for work in works)
        failed = any(isinstance(one, RequestError) for one in results)
        self.inbox.put(EncodeDone(works, results, math.inf if failed else self.seconds(len(works))))


@dataclass
class ScriptedDiskReader:
    """A disk reader that is done when a test says so; at once if `is_fast`."""

    caches: Caches
    inbox: SimpleQueue[InboxMessage]
    is_fast: bool = True
    work: DiskReadWork | None = None
    done: list[DiskReadWork] = field(default_factory=list)

    def start(self, work: DiskReadWork) -> None:
        assert self.work is None, "one request at a time"
        self.work = work
        if self.is_fast:
            self.finish()

    def finish(self) -> None:
        work, self.work = self.work, None
        assert work is not None
        self.done.append(work)
        loaded = self.caches.read_disk(work.disk_read, lambda: work.cancellation.is_cancelled)
        self.inbox.put(DiskReadDone(work.request_id, loaded))


class SteppedEngine:
    """A loop with all its events and plans.

    `memory` is ample unless it is given.
    """

    def __init__(
        self,
        caches: Caches | None = None,
        memory: FakeMemory | None = None,
        scheduler: type[Scheduler] = Scheduler,
        clock: Callable[[], float] = time.monotonic,
        decoder: Tokenizer | None = None,
        **limits: object,
    ) -> None:
        self.config = config(**{"max_preparing": 9, **limits})
        self.caches = Caches() if caches is None else caches
        self.memory = FakeMemory() if memory is None else memory
        self.process = FakeProcess()
        self.runner = FakeRunner(
            self.config.max_num_seqs, self.config.prefill_chunk_tokens, caches=self.caches
        )
        self.governor = Governor(MemorySettings(), self.memory, self.process, self.caches)
        self.admission = Admission(
            self.governor, self.runner.kv_bytes, self.config.prefill_chunk_tokens
        )
        self.scheduler = scheduler(
            self.config,
            decoder or ByteDecoder(),
            self.caches,
            self.admission,
            header_pixels,
            self.runner.max_piggybacked_tokens,
            clock=clock,
        )
        self.inbox = ImpatientQueue()
        self.preparers = ScriptedPreparers(self.inbox)
        self.disk_reader = ScriptedDiskReader(self.caches, self.inbox)
        self.encoder = ScriptedEncoder(self.inbox)
        self.events: list[Event] = []
        self.plans: list[SchedulerOutput] = []
        self.loop = self.new_loop()

    def new_loop(self) -> EngineLoop:
        return EngineLoop(
            self.inbox,
            self.scheduler,
            self.runner,
            self.preparers,
            self.disk_reader,
            self.encoder,
            self.governor,
            self.events.append,
            max_failed_steps=1000,
        )

    # ---- what comes in ---------------------------------------------------------------

    def add(self, *names: str, text: str = "hello", images: int = 0, **sampling: object) -> None:
        """Post requests before the next step."""
        for name in names:
            self.inbox.put(submit(name, text, images, **sampling))

    def ready(self, *names: str, text: str = "hello", images: int = 0, **sampling: object) -> None:
        """Post requests whose preparations end before the next step, in reverse order."""
        usual, self.preparers.outcome = self.preparers.outcome, None
        self.add(*names, text=text, images=images, **sampling)
        self.step()
        for name in reversed(names):
            self.preparers.finish(name)
        self.preparers.outcome = usual

    def add_prepared(self, name: str, prepared_prompt: PreparedPrompt) -> None:
        """Post a request whose prompt is `prepared_prompt`."""
        usual, self.preparers.outcome = self.preparers.outcome, None
        self.inbox.put(submit(name, images=len(prepared_prompt.spans)))
        self.step()
        self.preparers.finish(name, prepared(prepared_prompt, self.caches))
        self.preparers.outcome = usual

    def abort(self, name: str) -> None:
        self.inbox.put(Abort(name))

    def drain(self) -> None:
        self.inbox.put(Drain())

    # ---- the beat --------------------------------------------------------------------

    def step(self) -> SchedulerOutput:
        """Run one step of the loop; returns its plan."""
        plan = self.loop.step()
        self.plans.append(plan)
        return plan

    def accept(self) -> list[Event]:
        """Run a step that accepts posted requests; returns its events."""
        before = len(self.events)
        self.step()
        return self.events[before:]

    def run(self, steps: int = 1000) -> list[Event]:
        """Run until no more work can finish; returns the new events."""
        before, idle = len(self.events), 0
        while idle < 2 or not self.inbox.empty():
            plan = self.step()
            planned = (plan.prepare, plan.disk_read, plan.encode, plan.refused)
            has_work = plan.has_runner_work or any(planned)
            idle = 0 if has_work else idle + 1
            steps -= 1
            assert steps, "no end"
        return self.events[before:]

    def step_until(self, condition: Callable[[], bool]) -> None:
        step_until(self.step, condition)

    # ---- what can be seen ------------------------------------------------------------

    def count(self, state: State) -> int:
        return self.scheduler.stats().requests[state.value]

    def state_of(self, name: str) -> State | None:
        """The state of a request; None before its arrival and after its end."""
        request = self.scheduler._requests.get(name)
        return request.state if request else None

    def request(self, name: str) -> Request:
        return self.scheduler._requests[name]

    @property
    def num_tracked(self) -> int:
        return self.scheduler.stats().tracked

    @property
    def chunks(self) -> list[tuple[str, int, int]]:
        """(request, start, end) of every chunk so far."""
        chunks = [plan.prefills[0] for plan in self.plans if plan.prefills]
        return [(chunk.request_id, chunk.start, chunk.end) for chunk in chunks]

    @property
    def ended(self) -> list[str]:
        """The ids of ended requests, in order of their terminal events."""
        return ends_in(self.events)

    @property
    def usages(self) -> dict[str, Usage]:
        """The usage of each answered request."""
        return {e.request_id: e.usage for e in self.events if isinstance(e, Finished)}

    def is_clean(self) -> bool:
        """Whether no state of any request is left."""
        pinned = sum(reading.pinned_bytes for reading in self.caches.stats())
        return not (self.num_tracked or self.runner.num_tracked or pinned)


def ends_in(events: list[Event]) -> list[str]:
    return [event.request_id for event in events if isinstance(event, Finished | Failed)]
