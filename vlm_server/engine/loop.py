"""The inference thread's loop of steps, until the engine is drained.

    plan     = scheduler.schedule()            all work of this step
    preparers.start(plan.prepare), disk_reader.start(plan.disk_read), encoder.start(plan.encode)
    launched = runner.launch(plan)             returns when the device has its work
    encoder.start(plan.encode_during_step)     during the launched step
    result   = launched.result()               waits for the tokens
    events   = scheduler.update(plan, result)
    encoder.advance_encode()                   if it has no thread of its own

Messages of other threads are handled between two steps. Requests change only here, on the thread
that calls `run`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from queue import Empty

from vlm_server.engine.heartbeat import Heartbeat
from vlm_server.engine.inbox import DiskReadDone, EncodeDone, Inbox, InboxMessage, PrepareDone
from vlm_server.engine.memory.governor import Governor
from vlm_server.engine.scheduler.scheduler import Scheduler
from vlm_server.engine.threads import DiskReaderThread, PreparerThreads
from vlm_server.errors import DeviceLimit, EngineBroken, OutOfMemory, RequestError
from vlm_server.interfaces import (
    DiskReadWork,
    EncodeExecutor,
    EncodeWork,
    Runner,
    SchedulerOutput,
    StepResult,
)
from vlm_server.protocol import (
    ENCODER,
    PREPARERS,
    Abort,
    ClearCaches,
    Drain,
    Event,
    OnDevice,
    SetMemoryLimit,
    Stats,
    Submit,
)

logger = logging.getLogger(__name__)

_STATS_SECONDS = 1.0
_MEMORY_RETRY_SECONDS = 0.05
"""The interval of admission attempts while requests only wait for memory."""
_PRECOMPILE_AFTER_SECONDS = 0.25
"""Idle time before precompiling: a quick follow-up request would otherwise wait up to 50 ms."""


@dataclass(eq=False)
class EngineLoop:
    """The driver of scheduler, runner and the other threads; `send` gets all events."""

    inbox: Inbox
    scheduler: Scheduler
    runner: Runner
    preparers: PreparerThreads
    disk_reader: DiskReaderThread
    encoder: EncodeExecutor
    governor: Governor
    send: Callable[[Event], None]
    max_failed_steps: int
    _num_failed_steps: int = field(default=0, init=False)
    _last_plan: SchedulerOutput = field(default=SchedulerOutput(), init=False)
    _announced: OnDevice = field(default=OnDevice(), init=False)
    """The last announcement of the work on the device."""
    _heartbeat: Heartbeat = field(default_factory=Heartbeat, init=False)
    _last_stats: Stats | None = field(default=None, init=False)
    _stats_due: float = field(default=0.0, init=False)
    _precompile_due: float | None = field(default=0.0, init=False)
    """The time from which the runner may precompile; None if nothing is left."""

    def run(self) -> None:
        """Run steps until drained, and until the runner has dropped the last sequences.

        Raises EngineBroken after `max_failed_steps` failed steps in a row, and any error of the
        runner, whose state is then unknown: the process must end.
        """
        while not self.step().is_drained:
            pass

    def run_until_idle(self) -> None:
        """Run steps until all requests posted so far have ended and left the runner."""
        while not (self._last_plan.is_idle and self.inbox.empty()):
            self.step()

    def step(self) -> SchedulerOutput:
        """Handle the inbox, waiting for it if there is no work; then run one step."""
        self._handle_inbox()
        self._send_all(self.scheduler.expire())
        self._last_plan = SchedulerOutput()  # frees the references to its features
        plan = self._last_plan = self.scheduler.schedule()
        if not plan.is_idle:
            self._precompile_due = time.monotonic() + _PRECOMPILE_AFTER_SECONDS
        self._free_memory_if_idle(plan)
        for work in plan.prepare:
            self._heartbeat.start(PREPARERS, work.submit.request_id, work.cancellation.num_checks)
            self.preparers.start(work)
        self._announce(plan.on_device)
        self._start_disk_read(plan.disk_read)
        self._start_encode(plan.encode)
        result = self._execute(plan) if plan.has_runner_work else StepResult()
        self._send_all(self.scheduler.update(plan, result))
        self._advance_encode(plan)
        if plan.has_runner_work:
            self._record_step(plan, result)
        if time.monotonic() >= self._stats_due:
            self.send_stats()
        return plan

    # ---- the device ----------------------------------------------------------------

    def _execute(self, plan: SchedulerOutput) -> StepResult:
        started_at = time.perf_counter()
        if plan.prefills:
            self.governor.before_chunk()
        launched = self.runner.launch(plan)
        self._announce(plan.on_device_during_step)
        self._start_encode(plan.encode_during_step)
        result = launched.result()
        _log_step(plan, time.perf_counter() - started_at)
        return result

    def _start_disk_read(self, work: DiskReadWork | None) -> None:
        if work is None:
            return
        self.governor.before_disk_read(work.disk_read.size_bytes + work.disk_read.transient_bytes)
        self.disk_reader.start(work)

    def _start_encode(self, encodes: Sequence[EncodeWork]) -> None:
        if not encodes:
            return
        self.governor.before_encode(sum(encode.num_tokens for encode in encodes))
        self._heartbeat.start(ENCODER, encodes[0].request_id)
        self.encoder.start(encodes)

    def _advance_encode(self, plan: SchedulerOutput) -> None:
        """Launch the next part of an encode whose executor has no thread of its own."""
        if self.encoder.has_parts_left:
            self.runner.synchronize()  # late errors of the step are not the encode's
        self.encoder.advance_encode(is_alone=not plan.has_runner_work)

    def _announce(self, on_device: OnDevice) -> None:
        """Send the front the work that the device is about to do, if it changes.

        If the process dies now, the supervisor blames these requests (`quarantine`), and none that
        waits.
        """
        if on_device != self._announced:
            self._announced = on_device
            self.send(on_device)

    def _record_step(self, plan: SchedulerOutput, result: StepResult) -> None:
        if plan.prefills:
            first = plan.prefills[0]
            joined_running = first.is_last and bool(plan.decode or plan.is_batched_prefill)
            self.governor.after_chunk(
                plan.num_prefill_tokens,
                is_last=first.is_last,
                made_copies=joined_running or bool(first.branches),
            )
        self.governor.after_decode(len(plan.decode), awaits_first_token=plan.waits_for_first_token)
        self._handle_device_limits(result.failures.values())
        self._count_failures(plan, result)

    def _handle_device_limits(self, errors: Collection[object]) -> None:
        """Count `DeviceLimit` errors by code; free unused device memory after an `OutOfMemory`."""
        for error in errors:
            if isinstance(error, DeviceLimit):
                self.governor.count_decision(f"failure_{error.code}")
        if any(isinstance(error, OutOfMemory) for error in errors):
            self.governor.free_unused_memory()

    def _count_failures(self, plan: SchedulerOutput, result: StepResult) -> None:
        """Count failed steps since the last token or result, which shows that the model works.

        A step that was too much for the device does not count, unless sequences decoded in it.
        """
        failures = result.failures.values()
        only_too_much = failures and all(isinstance(error, DeviceLimit) for error in failures)
        if result.tokens or result.pooled or result.decisions:
            self._num_failed_steps = 0
        elif result.error is not None and (plan.decode or not only_too_much):
            self._num_failed_steps += 1
        if self._num_failed_steps >= self.max_failed_steps:
            raise EngineBroken(
                f"{self._num_failed_steps} steps in a row failed, the last with: {result.error}"
            )

    # ---- the inbox -----------------------------------------------------------------

    def _handle_inbox(self) -> None:
        """Handle the whole inbox; wait for its first message if the last plan had no work.

        The wait ends in time for the next task, and within a second while there are requests: the
        supervisor's watchdog takes longer silence for a hang.
        """
        is_busy = self._last_plan.has_runner_work or self.encoder.has_parts_left
        wait = not (is_busy or self._last_plan.refused)  # a refusal makes room for the next request
        if wait and self.inbox.empty():
            self.send_stats()
            self._precompile()
        seconds = self._seconds_to_wait() if wait else None
        while True:
            try:
                message = self.inbox.get(block=wait, timeout=seconds)
            except Empty:
                return
            self._send_all(self._handle_message(message))
            wait = False

    def _precompile(self) -> None:
        """Precompile until a message comes, if there were no requests lately."""
        is_idle = self._last_plan.is_idle and not self._heartbeat.has_work
        while is_idle and self.inbox.empty() and self._seconds_to_precompile() == 0:
            if not self.runner.precompile_next():
                self._precompile_due = None

    def _seconds_to_precompile(self) -> float | None:
        due = self._precompile_due
        return None if due is None else max(due - time.monotonic(), 0.0)

    def _seconds_to_wait(self) -> float | None:
        """Seconds until the next task if no message comes; None if there is no task."""
        if self._last_plan.waits_for_memory:
            return _MEMORY_RETRY_SECONDS
        if self._must_send_stats:
            return min(_STATS_SECONDS, self.scheduler.seconds_to_deadline())
        until_clear = self.governor.seconds_until_clear()
        deadlines = (
            None if until_clear is None else min(until_clear, _STATS_SECONDS),
            self.governor.seconds_until_poll(),
            self._seconds_to_precompile(),
        )
        return min((seconds for seconds in deadlines if seconds is not None), default=None)

    def _handle_message(self, message: InboxMessage) -> list[Event]:
        match message:
            case Submit():
                return self.scheduler.add(message)
            case Abort():
                return self.scheduler.abort(message.request_id)
            case PrepareDone():
                self._heartbeat.finish(PREPARERS, message.request_id)
                return self.scheduler.on_prepared(message.request_id, message.outcome)
            case DiskReadDone():
                self._on_disk_read(message)
                return []
            case EncodeDone():
                return self._on_encoded(message)
            case SetMemoryLimit(limit_bytes):
                self.governor.set_limit(limit_bytes, self.scheduler.reserved_bytes)
                return []
            case ClearCaches():
                self.governor.clear_caches()
                return []
            case Drain():
                self.scheduler.drain()
                return []

    def _on_disk_read(self, disk_read: DiskReadDone) -> None:
        self.governor.mark_busy()
        if disk_read.result.is_out_of_memory:
            self.governor.free_unused_memory()
        self.scheduler.on_disk_read(disk_read.request_id, disk_read.result)

    def _on_encoded(self, encode_done: EncodeDone) -> list[Event]:
        self._heartbeat.finish(ENCODER, encode_done.encodes[0].request_id)
        encoded = [image for image in encode_done.outcomes if not isinstance(image, RequestError)]
        self.governor.mark_busy()  # the device has worked, even if the requests are gone
        num_tokens = tokens_per_call = sum(encode.num_tokens for encode in encode_done.encodes)
        if len(encode_done.encodes) == len(encoded) == 1 and encoded[0].tokens_per_call is not None:
            tokens_per_call = encoded[0].tokens_per_call  # one image in several calls
        size_bytes = sum(image.size_bytes for image in encoded)
        self.governor.after_encode(num_tokens, size_bytes, tokens_per_call)
        self._handle_device_limits(encode_done.outcomes)
        return self.scheduler.on_encoded(
            encode_done.encodes, encode_done.outcomes, encode_done.seconds
        )

    def _free_memory_if_idle(self, plan: SchedulerOutput) -> None:
        """Without requests, free device memory that is due; with some, restart the idle time."""
        if plan.has_requests:
            self.governor.mark_busy()
        elif not plan.has_runner_work:
            self.governor.give_back_to_other_programs()
            if self.governor.seconds_until_clear() == 0:
                self.governor.clear_when_idle()

    # ---- events --------------------------------------------------------------------

    def _send_all(self, events: Iterable[Event]) -> None:
        for event in events:
            self.send(event)

    def send_stats(self) -> None:
        """Send a reading of the engine, if it has changed or somebody waits for it."""
        self._stats_due = time.monotonic() + _STATS_SECONDS
        stats = self._stats()
        if stats != self._last_stats or self._must_send_stats:
            self._last_stats = stats
            self.send(stats)

    @property
    def _must_send_stats(self) -> bool:
        """Whether the supervisor's watchdog waits for signs of life."""
        return self._last_plan.has_requests or self._heartbeat.has_work

    def _stats(self) -> Stats:
        scheduler_stats = self.scheduler.stats()
        tracked_by = {
            "scheduler": scheduler_stats.tracked,
            "runner": self.runner.num_tracked,
            "preparer": self.preparers.num_tracked,
        }
        return Stats(
            tracked_by=tracked_by,
            memory=self.governor.stats(self.scheduler.reserved_bytes),
            at_work=self._heartbeat.read_oldest(),
            **vars(scheduler_stats),
        )


def _log_step(plan: SchedulerOutput, seconds: float) -> None:
    logger.debug(
        "step of %.1f ms: %d sequences, %d tokens of %s",
        1000 * seconds,
        len(plan.decode),
        plan.num_prefill_tokens,
        ", ".join(chunk.request_id for chunk in plan.prefills) or "no prompt",
    )
