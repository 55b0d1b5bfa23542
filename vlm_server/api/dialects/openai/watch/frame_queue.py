"""The frames of one watch: the newest one, those that the model has seen, and their counts."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from msgspec import Struct

from vlm_server.api.parsing.media.frame import FrameFacts, changed_share


class Stamp(Struct, frozen=True):
    """Which frame it is. number: from 1, in order of arrival. time: seconds since 1970."""

    number: int
    time: float


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame of a watch, as it came."""

    stamp: Stamp
    data: bytes
    facts: FrameFacts


@dataclass(slots=True)
class Counts:
    """Numbers of frames. asked: the model saw them. unchanged: they were like the last of those.

    skipped: a newer one came before their turn. failed: they can't be decoded, or not be asked
    about.
    """

    received: int = 0
    asked: int = 0
    unchanged: int = 0
    skipped: int = 0
    failed: int = 0


@dataclass(slots=True)
class FrameQueue:
    """Holds the newest frame, until it is taken, and the last `window` frames taken.

    A frame is compared with the last one taken, so that slow changes add up.
    """

    window: int
    min_change: float
    pixel_change: int
    counts: Counts = field(default_factory=Counts)
    has_news: asyncio.Event = field(default_factory=asyncio.Event)
    _newest: Frame | None = None
    _taken: deque[Frame] = field(default_factory=deque)
    _newest_number: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all frames held."""
        held = (*self._taken, self._newest)
        return sum(len(frame.data) for frame in held if frame is not None)

    def confirms(self, number: int, data: bytes) -> bool:
        """Whether frame `number` has the bytes of the newest one, and needs no other look.

        Those between the two that are still being read come too late then.
        """
        last = self._newest or (self._taken[-1] if self._taken else None)
        if last is None or last.data != data:
            return False
        self._newest_number = max(self._newest_number, number)
        self.counts.unchanged += 1
        return True

    def offer(self, frame: Frame) -> float:
        """Let `frame` be the newest, unless a newer one has been; returns its change, 0 to 1."""
        change = self._change(frame)
        if frame.stamp.number < self._newest_number:
            self.counts.skipped += 1
            return change
        self._newest_number = frame.stamp.number
        if self._newest is not None:
            self.counts.skipped += 1
            self._newest = None
        if self._is_news(frame, change):
            self._newest = frame
            self.has_news.set()
        else:
            self.counts.unchanged += 1
            self.has_news.clear()
        return change

    def take(self) -> tuple[Frame, ...]:
        """The frames of the next question, the newest last; empty if nothing has changed."""
        self.has_news.clear()
        frame, self._newest = self._newest, None
        if frame is None:
            return ()
        if not self._is_news(frame, self._change(frame)):
            self.counts.unchanged += 1
            return ()
        self._taken.append(frame)
        while len(self._taken) > self.window:
            self._taken.popleft()
        return tuple(self._taken)

    def put_back(self) -> None:
        """Take back the last `take`: its question got no answer, and may be asked again."""
        frame = self._taken.pop()
        if self._newest is None:
            self._newest = frame
        else:
            self.counts.skipped += 1
        self.has_news.set()

    def drop_last(self) -> None:
        """Forget the last frame taken, which is at fault."""
        self._taken.pop()
        self.counts.failed += 1

    def _is_news(self, frame: Frame, change: float) -> bool:
        if not self._taken:
            return True
        is_other = frame.facts.content_hash != self._taken[-1].facts.content_hash
        return is_other and change >= self.min_change

    def _change(self, frame: Frame) -> float:
        if not self._taken:
            return 1.0
        before = self._taken[-1].facts.thumbnail
        return changed_share(before, frame.facts.thumbnail, self.pixel_change)
