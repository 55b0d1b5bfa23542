"""One watch: asks its question about new frames, and reports answers that change."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence

from vlm_server.api.dialects.openai.watch import events
from vlm_server.api.dialects.openai.watch.events import EndReason
from vlm_server.api.dialects.openai.watch.frame_queue import Frame, FrameQueue, Stamp
from vlm_server.api.dialects.openai.watch.reading import Reading
from vlm_server.api.dialects.openai.watch.schema import WatchPlan
from vlm_server.api.fair_turns import FairTurns
from vlm_server.errors import (
    DecodeBudgetExceeded,
    EngineDied,
    EngineUnavailable,
    InternalError,
    InvalidImage,
    QueueFull,
    QueueTimeout,
    RequestError,
    RequestTooCostly,
)
from vlm_server.errors import DeviceLimit as _DeviceLimit
from vlm_server.settings import WatchSettings

ID_PREFIX = "watch_"
_PASSING = (EngineDied, EngineUnavailable, QueueFull, QueueTimeout, *_DeviceLimit.__args__)
"""Errors after which the question is asked again."""
_OF_FRAME = (InvalidImage, DecodeBudgetExceeded, RequestTooCostly)
"""Errors that are a frame's fault."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.25, 5.0
_GOES_ON = "The watch goes on, and asks again."

Ask = Callable[[Sequence[Frame]], Awaitable[Reading]]
Write = Callable[[bytes], Awaitable[None]]


class Watch:
    """A standing question of `owner` about the frames that are given to `frames`.

    `run` writes its events; `end` ends it, once, from anywhere on the event loop.
    """

    def __init__(
        self, owner: str, plan: WatchPlan, turns: FairTurns, settings: WatchSettings
    ) -> None:
        self.id = f"{ID_PREFIX}{uuid.uuid4().hex}"
        self.owner = owner
        self.plan = plan
        self.frames = FrameQueue(plan.window, plan.min_change, plan.pixel_change)
        self.num_answers = 0
        """Events with an answer so far."""
        self.is_closed = asyncio.Event()
        """Set when its last event is sent, or its client gone."""
        self._turns = turns
        self._idle_seconds = settings.idle_timeout_seconds
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[tuple[EndReason, RequestError | None]]
        self._ended = self._loop.create_future()
        self._last: tuple[Stamp, Reading] | None = None
        """The answer reported last, and its frame."""
        self._max_rate = settings.max_frames_per_second
        self._credit, self._admitted_at = max(self._max_rate, 1.0), self._loop.time()
        """Frames that may come at once, and when this was so."""
        self._num_skipped = 0
        """Skipped frames up to the answer reported last."""
        self._trouble = ""
        """The code of the error that is being waited out or was noticed last."""
        self._is_resting = asyncio.Event()
        """Set while there is no news, and no question in progress."""
        self._is_resting.set()
        self._idle = self._loop.call_later(settings.idle_timeout_seconds, self.end, "idle")

    @property
    def is_over(self) -> bool:
        return self._ended.done()

    def admit(self) -> None:
        """Note that a frame has come: the watch is not idle. Raises QueueFull if it comes too soon.

        A second's worth of frames may come at once.
        """
        now = self._loop.time()
        rate, since = self._max_rate, now - self._admitted_at
        self._credit = min(self._credit + since * rate, max(rate, 1.0))
        self._admitted_at = now
        if self._credit < 1:
            raise QueueFull(
                f"A watch takes {rate:g} frames a second (watch.max_frames_per_second).",
                retry_after_seconds=1.0,
            )
        self._credit -= 1
        self._idle.cancel()
        if not self._ended.done():
            self._idle = self._loop.call_later(self._idle_seconds, self.end, "idle")

    def end(self, reason: EndReason, error: RequestError | None = None) -> None:
        """End the watch; later calls do nothing."""
        if not self._ended.done():
            self._ended.set_result((reason, error))

    async def until_asked(self) -> None:
        """Wait until no frame waits for its question, and none is being answered."""
        if self.frames.has_news.is_set():
            self._is_resting.clear()  # the task that asks has not woken yet
        await self._is_resting.wait()

    async def run(self, ask: Ask, write: Write, write_last: Write) -> None:
        """Write events until the end, which is the one event given to `write_last`."""
        await write(events.started(self.id, self.plan.model))
        asking = asyncio.create_task(self._ask_always(ask, write))
        asking.add_done_callback(self.end_if_failed)
        try:
            reason, error = await self._ended
        finally:
            self._idle.cancel()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await write_last(events.ended(self.id, reason, error, self.frames.counts))

    def end_if_failed(self, task: asyncio.Task[None]) -> None:
        """End the watch with the error of a task that works for it, if it has one."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, RequestError):
            self._loop.call_exception_handler({"message": "a watch failed", "exception": error})
            error = InternalError("The server failed.")
        self.end("failed", error)

    async def _ask_always(self, ask: Ask, write: Write) -> None:
        """Raises the RequestError that ends the watch."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            if not self.frames.has_news.is_set():
                self._is_resting.set()
            await self.frames.has_news.wait()
            self._is_resting.clear()
            began_at = self._loop.time()
            try:
                async with self._turns.turn(self.owner):
                    await self._ask_about_newest(ask, write)
            except _PASSING as error:
                await self._notice(error, f"{error.message} {_GOES_ON}", write)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                continue
            pause = _FIRST_PAUSE_SECONDS
            rest = self.plan.interval_seconds - (self._loop.time() - began_at)
            await asyncio.sleep(max(0.0, rest))

    async def _ask_about_newest(self, ask: Ask, write: Write) -> None:
        """Ask about the newest frame, if it is news. Raises RequestError."""
        frames = self.frames.take()
        if not frames:
            return
        num_skipped = self.frames.counts.skipped
        try:
            reading = await ask(frames)
        except _PASSING:
            self.frames.put_back()
            raise
        except _OF_FRAME as error:
            self.frames.drop_last()
            await self._notice(error, f"{error.message} The frame is left out.", write)
        else:
            await self._report(frames[-1].stamp, reading, num_skipped, write)

    async def _report(self, frame: Stamp, reading: Reading, num_skipped: int, write: Write) -> None:
        self.frames.counts.asked += 1
        if self._trouble:
            self._trouble = ""
            await write(events.noticed("resumed", "Questions are answered again.", frame))
        previous = None if self._last is None else self._last[1]
        is_new = previous is None or previous.answer != reading.answer
        if is_new and reading.is_surer_than(previous, self.plan.min_probability):
            self.num_answers += 1
            skipped, self._num_skipped = num_skipped - self._num_skipped, num_skipped
            await write(events.answered(frame, reading, self._last, skipped))
            self._last = frame, reading

    async def _notice(self, error: RequestError, message: str, write: Write) -> None:
        """Say what went wrong, once as long as it goes on."""
        if error.code != self._trouble:
            self._trouble = error.code
            await write(events.noticed(error.code, message))
