"""FairQueue the scheduler's plans into steps, for as long as the process lives.

Knows the ports, the inbox and the order of things; knows no mlx, no sockets. Everything that
changes a request happens on the thread that calls `run`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from vlm_server.cache.caches import EncodedImage
from vlm_server.engine.memory.governor import Governor
from vlm_server.engine.request.states import State
from vlm_server.engine.scheduling.scheduler import Scheduler
from vlm_server.errors import EngineBroken, InternalError, OutOfMemory, RequestError
from vlm_server.ports import (
    Encoder,
    EncodeWork,
    PreparedPrompt,
    Preparer,
    Runner,
    SchedulerOutput,
    StepResult,
)
from vlm_server.protocol import Abort, Drain, Event, Stats, Submit, Working

logger = logging.getLogger(__name__)

_STATS_SECONDS = 1.0
_MEMORY_SECONDS = 0.05
"""Between two looks whether a request that waits for memory can be let in."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    request_id: str
    outcome: PreparedPrompt | RequestError


@dataclass(frozen=True, slots=True)
class _Encoded:
    request_id: str
    num_tokens: int
    outcome: EncodedImage | RequestError


Message = Submit | Abort | Drain | _Prepared | _Encoded
Inbox = SimpleQueue[Message]
"""All that the loop hears, from any thread."""


class EngineLoop:
    """The inference thread's work: inbox, preparers, encoder, the three beats, events out."""

    def __init__(
        self,
        inbox: Inbox,
        scheduler: Scheduler,
        runner: Runner,
        preparer: Preparer,
        encoder: Encoder,
        governor: Governor,
        send: Callable[[Event], None],
        preparer_threads: int,
        max_failed_steps: int,
    ) -> None:
        self.send = send
        self._inbox = inbox
        self._scheduler = scheduler
        self._runner = runner
        self._preparer = preparer
        self._encoder = encoder
        self._governor = governor
        self._preparers = ThreadPoolExecutor(preparer_threads, "preparer")
        self._tokenizers = ThreadPoolExecutor(preparer_threads, "tokenizer")
        self._encoder_thread = ThreadPoolExecutor(1, "encoder")
        self._max_failed_steps = max_failed_steps
        self._num_failed_steps = 0
        self._encoding: str | None = None
        self._announced: set[str] = set()
        self._last_stats: Stats | None = None
        self._stats_due = 0.0

    def post(self, command: Submit | Abort | Drain) -> None:
        """Hand a command over; from any thread."""
        self._inbox.put(command)

    def run(self) -> None:
        """Work until drained, and until the runner has kept what the last answers leave behind.

        What the runner raises ends the process: its state is unknown.

        Raises EngineBroken after `max_failed_steps` steps that failed with no token between them.
        """
        scheduler = self._scheduler
        while not scheduler.is_draining or scheduler.has_requests or scheduler.has_runner_work:
            self.turn()

    def run_until_idle(self) -> None:
        """Work until nothing is left of any request posted so far."""
        while not self._inbox.empty() or self._scheduler.num_tracked:
            self.turn()

    def reset_stats(self) -> None:
        """Leave nothing of what ran so far in counters, caches and the pool."""
        self._scheduler.reset_stats()
        self._governor.reset_stats()

    def turn(self) -> None:
        """Take in what came, and do one step; wait for news if there is nothing to do."""
        if not self._scheduler.has_runner_work and self._inbox.empty():
            self._send_stats()
        self._take_in()
        for submit in self._scheduler.start_preparing():
            threads = self._preparers if submit.has_media else self._tokenizers
            threads.submit(self._prepare, submit)
        self._send_all(self._scheduler.admit())
        work = self._scheduler.start_encoding()
        plan = self._scheduler.schedule()
        following = self._scheduler.start_encoding_behind(plan)
        self._announce(work, plan)
        self._start_encode(work)
        if not plan.is_empty:
            self._step(plan, following)
        if time.monotonic() >= self._stats_due:
            self._send_stats()

    def _start_encode(self, work: EncodeWork | None) -> None:
        if work:
            self._governor.before_encode(_num_tokens(work))
            self._encoder_thread.submit(self._encode, work)

    def _step(self, plan: SchedulerOutput, following: EncodeWork | None) -> None:
        """Carry out `plan`, and have `following` encoded from when its chunk is launched."""

        def launched() -> None:
            if following:
                self._announce(following, plan)
            self._start_encode(following)

        started = time.perf_counter()
        if plan.prefill:
            self._governor.before_chunk()
        result = self._runner.execute(plan, launched)
        self._send_all(self._scheduler.update(plan, result))
        if chunk := plan.prefill:
            has_merged = chunk.is_last and bool(plan.decode)
            self._governor.after_chunk(
                chunk.end - chunk.start, is_last=chunk.is_last, has_merged=has_merged
            )
        self._governor.after_decode(
            len(plan.decode), somebody_waits=self._scheduler.has_first_token_due
        )
        if any(isinstance(error, OutOfMemory) for error in result.failures.values()):
            self._governor.relieve()
        self._count_failures(plan, result)
        _log_step(plan, time.perf_counter() - started)

    def _take_in(self) -> None:
        """Handle the whole inbox; wait for its first entry if no step could be done.

        While requests are elsewhere, at a preparer or the encoder, it does not wait for ever:
        the front wants to hear that this thread lives. With none at all, the governor may want
        to be asked after a while.
        """
        wait = not self._scheduler.has_runner_work
        seconds = self._seconds_to_wait()
        while True:
            try:
                message = self._inbox.get(block=wait, timeout=seconds)
            except Empty:
                break
            self._send_all(self._handle(message))
            wait = False
        if self._scheduler.has_requests:
            self._governor.note_work()
        elif wait and self._governor.idle_seconds_left() == 0:
            self._governor.idle()

    def _seconds_to_wait(self) -> float | None:
        if self._scheduler.is_short_of_memory:
            return _MEMORY_SECONDS
        if self._scheduler.has_requests:
            return _STATS_SECONDS
        left = self._governor.idle_seconds_left()
        return None if left is None else min(left, _STATS_SECONDS)

    def _handle(self, message: Message) -> list[Event]:
        match message:
            case Submit():
                return self._scheduler.add(message)
            case Abort():
                self._preparer.abandon(message.request_id)
                return self._scheduler.abort(message.request_id)
            case _Prepared():
                return self._scheduler.prepared(message.request_id, message.outcome)
            case _Encoded():
                self._encoding = None
                self._governor.note_work()
                self._governor.after_encode(message.num_tokens, _size_bytes(message.outcome))
                if isinstance(message.outcome, OutOfMemory):
                    self._governor.relieve()
                return self._scheduler.encoded(message.request_id, message.outcome)
            case Drain():
                self._scheduler.is_draining = True
                return []

    def _announce(self, work: EncodeWork | None, plan: SchedulerOutput) -> None:
        """Say whose work the device gets, if it changes hands, before it may die of it."""
        if work:
            self._encoding = work.request_id
        prefilling = plan.prefill.request_id if plan.prefill else None
        request_ids = {one for one in (self._encoding, prefilling) if one is not None}
        is_between = not request_ids and self._scheduler.has_first_token_due
        if request_ids != self._announced and not is_between:
            self._announced = request_ids
            self.send(Working(tuple(request_ids)))

    def _count_failures(self, plan: SchedulerOutput, result: StepResult) -> None:
        """A token shows that the model works; a chunk alone does not.

        A prompt that finds no memory, alone, shows nothing: it fails as often as it is asked.
        """
        failures = result.failures.values()
        found_no_memory = failures and all(isinstance(one, OutOfMemory) for one in failures)
        if result.tokens:
            self._num_failed_steps = 0
        elif result.error is not None and (plan.decode or not found_no_memory):
            self._num_failed_steps += 1
        if self._num_failed_steps >= self._max_failed_steps:
            raise EngineBroken(
                f"{self._num_failed_steps} steps in a row failed, the last with: {result.error}"
            )

    def _prepare(self, submit: Submit) -> None:
        """On a preparer thread: whatever happens, exactly one outcome is posted."""
        outcome: PreparedPrompt | RequestError
        started = time.perf_counter()
        try:
            outcome = self._preparer.prepare(submit)
        except RequestError as error:
            outcome = error
        except BaseException:  # so that the request ends whatever happens; a Rust panic is one
            logger.exception("preparing a request failed")
            outcome = InternalError("the request could not be prepared")
        milliseconds = 1000 * (time.perf_counter() - started)
        logger.debug("prepared %s in %.1f ms", submit.request_id, milliseconds)
        self._inbox.put(_Prepared(submit.request_id, outcome))

    def _encode(self, work: EncodeWork) -> None:
        """On the encoder's thread: whatever happens, exactly one outcome is posted."""
        outcome: EncodedImage | RequestError
        started = time.perf_counter()
        try:
            outcome = self._encoder.encode(work.prompt, work.image_index)
        except RequestError as error:
            outcome = error
        except BaseException:
            logger.exception("encoding a picture failed")
            outcome = InternalError("the model failed while encoding a picture")
        milliseconds = 1000 * (time.perf_counter() - started)
        logger.debug("encoded %d of %s in %.1f ms", work.image_index, work.request_id, milliseconds)
        self._inbox.put(_Encoded(work.request_id, _num_tokens(work), outcome))

    def _send_all(self, events: list[Event]) -> None:
        for event in events:
            self.send(event)

    def _send_stats(self) -> None:
        self._stats_due = time.monotonic() + _STATS_SECONDS
        stats = self._stats()
        if stats != self._last_stats or self._scheduler.has_requests:
            self._last_stats = stats
            self.send(stats)

    def _stats(self) -> Stats:
        scheduler = self._scheduler
        tracked_by = {
            "scheduler": scheduler.num_tracked,
            "runner": self._runner.num_tracked,
            "preparer": self._preparer.num_tracked,
        }
        return Stats(
            waiting=scheduler.count(State.WAITING),
            preparing=scheduler.count(State.PREPARING),
            prefilling=scheduler.count(State.PREFILL),
            decoding=scheduler.count(State.DECODE),
            tracked=scheduler.num_tracked,
            tracked_by=tracked_by,
            memory=self._governor.read(),
            generated_tokens=scheduler.num_generated_tokens,
            prompt_tokens=scheduler.num_prompt_tokens,
            cached_tokens=scheduler.num_cached_tokens,
            caches=scheduler.cache_stats,
        )


def _size_bytes(outcome: EncodedImage | RequestError) -> int:
    return 0 if isinstance(outcome, RequestError) else outcome.size_bytes


def _num_tokens(work: EncodeWork) -> int:
    span = work.prompt.images[work.image_index]
    return span.end - span.start


def _log_step(plan: SchedulerOutput, seconds: float) -> None:
    chunk = plan.prefill
    logger.debug(
        "step of %.1f ms: %d rows, %d tokens of %s",
        1000 * seconds,
        len(plan.decode),
        chunk.end - chunk.start if chunk else 0,
        chunk.request_id if chunk else "no prompt",
    )
