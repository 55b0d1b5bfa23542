"""What the front tells an engine."""

from __future__ import annotations

import signal

import msgspec

from vlm_server import settings
from vlm_server.protocol.ranks import Rank
from vlm_server.protocol.request import Submit


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first command: what to load and how to run it; `rank` if several processes do."""

    model: settings.Model
    scheduler: settings.Scheduler
    engine: settings.Engine
    log: settings.Log
    memory: settings.Memory = settings.Memory()
    image: settings.Image = settings.Image()
    video: settings.Video = settings.Video()
    cache: settings.Cache = settings.Cache()
    rank: Rank | None = None


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Finish what is running, take nothing new, write what waits for the disk, end the process."""


class SetMemoryLimit(msgspec.Struct, frozen=True, tag="set_memory_limit"):
    """From now on device memory has this limit: other models need, or left, the rest.

    What runs is let finish; `MemoryStats` tell when all of it is under the limit.
    """

    limit_bytes: int


class ClearCaches(msgspec.Struct, frozen=True, tag="clear_caches"):
    """Drop all that is cached in memory and not in use, and give freed memory back."""


STACKS_SIGNAL = signal.SIGUSR1
"""At this one, an engine writes the stacks of its threads to standard error, even if they hang."""
LAST_WRITES_SECONDS = 5.0
"""The most that an engine writes to the disk once all it ran is finished."""


Command = Start | Submit | Abort | Drain | SetMemoryLimit | ClearCaches
