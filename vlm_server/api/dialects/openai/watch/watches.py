"""All watches: their number, the bytes of their frames, and their frames' way in."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict

from vlm_server.api.dialects.openai.watch.asker import Asker
from vlm_server.api.dialects.openai.watch.frame_queue import Frame, Stamp
from vlm_server.api.dialects.openai.watch.schema import WatchPlan
from vlm_server.api.dialects.openai.watch.watch import Watch
from vlm_server.api.fair_turns import FairPool, FairTurns
from vlm_server.api.http.generation import Generation
from vlm_server.api.http.queue.queue_slots import FairShare
from vlm_server.api.http.urls.camera_url import CameraUrls
from vlm_server.api.parsing.media.frame import FrameFacts
from vlm_server.errors import EngineUnavailable, InvalidImage, NotFound, QueueFull, RequestError
from vlm_server.platform.child.pool import ChildFailed, ChildTimeout

_READER = "vlm_server.api.parsing.media.frame"
"""The program that reads frames: nothing hostile is decoded in the front."""
_FULL_SECONDS = 5.0
"""Time for which a key's share of the bytes is kept free after a refusal."""
_CLOSE_SECONDS = 2.0
_LOOK_SECONDS = 0.02
_STOPPING = "The server is stopping."


class Watches:
    """The watches of all keys, by id. Use from one event loop."""

    def __init__(self, shared: Generation) -> None:
        self.settings = shared.settings.watch
        self.asker = Asker(shared)
        self.num_answers = 0
        """Answers reported by watches that have ended."""
        self._turns = Turns(
            self.settings.max_running, self.settings.yield_seconds, self.asker.others_wait
        )
        self._shared = shared
        limits = shared.limits
        self._reader = FairPool(
            _READER,
            limits.max_parsing_processes,
            limits.parsing_timeout_seconds,
            limits.max_image_pixels,
            outcome=FrameFacts,
            memory_bytes=shared.settings.image.max_decode_memory_bytes,
        )
        self.cameras = CameraUrls(shared.settings.urls)
        self._by_id: dict[str, Watch] = {}
        self._bytes = FairShare(self.settings.max_bytes)
        self._held = Counter[str]()
        """Bytes counted by watch."""
        self._ended = Counter[str]()
        """Counts of frames of watches that have ended."""
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def size_bytes(self) -> int:
        return self._bytes.taken

    @property
    def frames(self) -> Counter[str]:
        """The number of frames so far by their fate, see `Counts`."""
        total = Counter(self._ended)
        for watch in self._by_id.values():
            total.update(asdict(watch.frames.counts))
        return total

    @property
    def total_answers(self) -> int:
        return self.num_answers + sum(watch.num_answers for watch in self._by_id.values())

    @property
    def device_seconds(self) -> float:
        return self.asker.device_seconds

    def check_room(self, owner: str) -> None:
        """Raises QueueFull if there are too many watches, and EngineUnavailable at the stop."""
        if self._is_closed:
            raise EngineUnavailable(_STOPPING)
        num_own = sum(watch.owner == owner for watch in self._by_id.values())
        for count, name in ((len(self), "max_watches"), (num_own, "max_watches_per_key")):
            limit = getattr(self.settings, name)
            if count >= limit:
                raise QueueFull(f"{count} of {limit} watches are open (watch.{name}).")

    def _check_cameras(self, owner: str) -> None:
        """Raises QueueFull if no camera more may be followed: a key has at most half of them."""
        limit = self.settings.max_cameras
        owners = [watch.owner for watch in self._by_id.values() if watch.plan.url]
        own_limit = (limit + 1) // 2 if self._shared.server.needs_key else limit
        if len(owners) >= limit or owners.count(owner) >= own_limit:
            raise QueueFull(
                f"{len(owners)} cameras are being watched, {owners.count(owner)} of this key, of "
                f"which there may be {limit} and {own_limit} (watch.max_cameras)."
            )

    @contextmanager
    def opened(self, owner: str, plan: WatchPlan) -> Iterator[Watch]:
        """A watch, for the `with` block. Raises QueueFull."""
        self.check_room(owner)
        if plan.url:
            self._check_cameras(owner)
        watch = Watch(owner, plan, self._turns, self.settings)
        self._by_id[watch.id] = watch
        try:
            yield watch
        finally:
            del self._by_id[watch.id]
            watch.end("deleted")  # its client is gone, if it has not ended
            watch.is_closed.set()
            self._bytes.release(owner, self._held.pop(watch.id, 0))
            self._ended.update(asdict(watch.frames.counts))
            self.num_answers += watch.num_answers

    def find(self, owner: str, watch_id: str) -> Watch:
        """Raises NotFound, also for another key's."""
        watch = self._by_id.get(watch_id)
        if watch is None or watch.owner != owner:
            raise NotFound("There is no such watch, or it has ended.", "watch_id")
        return watch

    async def close(self) -> None:
        """End all watches, and wait a moment for their last events: the server stops."""
        self._is_closed = True
        watches = list(self._by_id.values())
        for watch in watches:
            watch.end("shutdown")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                for watch in watches:
                    await watch.is_closed.wait()
        self._reader.close()

    async def give(
        self, watch: Watch, data: bytes, frame_time: float | None, client: str
    ) -> tuple[Stamp, float]:
        """Give `watch` a frame; returns its stamp and its change. Raises RequestError.

        `client` is the name of the key. Equal bytes are not even decoded.
        """
        watch.admit()
        counts = watch.frames.counts
        counts.received += 1
        stamp = Stamp(counts.received, time.time() if frame_time is None else frame_time)
        if watch.frames.confirms(stamp.number, data):
            return stamp, 0.0
        try:
            self._check_bytes(watch, len(data))
            with self._shared.queue_slots.hold(client, len(data)):
                facts = await self._read(data, watch.owner)
        except (RequestError, asyncio.CancelledError):
            counts.failed += 1
            raise
        if watch.is_over:
            counts.failed += 1
            raise NotFound("The watch has ended.", "watch_id")
        change = watch.frames.offer(Frame(stamp, data, facts))
        self._count_bytes(watch)
        return stamp, change

    async def _read(self, data: bytes, owner: str) -> FrameFacts:
        """The facts of the frame in `data`. Raises InvalidImage and EngineUnavailable."""
        try:
            return await self._reader.run(data, owner, self._shared.limits.parsing_timeout_seconds)
        except (ChildTimeout, ChildFailed):
            raise InvalidImage(
                "Decoding the frame takes too much time or memory.", "frame"
            ) from None

    def _check_bytes(self, watch: Watch, num_bytes: int) -> None:
        self._count_bytes(watch)
        now = time.monotonic()
        if not self._bytes.has_room(watch.owner, num_bytes, now):
            self._bytes.reserve_refused(watch.owner, num_bytes, now + _FULL_SECONDS)
            raise QueueFull(
                f"The frames of all watches take {self._bytes.taken} of {self._bytes.limit} bytes "
                "(watch.max_bytes); send smaller ones, or take a smaller `window`."
            )

    def _count_bytes(self, watch: Watch) -> None:
        """Count what the watch holds now."""
        more = watch.frames.num_bytes - self._held[watch.id]
        (self._bytes.take if more > 0 else self._bytes.release)(watch.owner, abs(more))
        self._held[watch.id] += more


class Turns(FairTurns):
    """At most `limit` questions at a time.

    With others waiting for the device (`others_wait`), a turn begins up to `yield_seconds` later.
    """

    def __init__(self, limit: int, yield_seconds: float, others_wait: Callable[[], bool]) -> None:
        super().__init__(limit)
        self._yield_seconds = yield_seconds
        self._others_wait = others_wait

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """The `with` block is one question of a watch of `owner`."""
        async with super().turn(owner):
            await self._yield_to_others()
            yield

    async def _yield_to_others(self) -> None:
        clock = asyncio.get_running_loop().time
        latest = clock() + self._yield_seconds
        while self._others_wait() and clock() < latest:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_SECONDS)
