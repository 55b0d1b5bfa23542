"""Reads the daemon's memory once a second, from `/v1/status` and `/proc`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec

_PERIOD_SECONDS = 1.0


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One moment: `seconds` since the start, `requests` that had ended, `users` asking.

    `active_bytes`, `pool_bytes` and `peak_bytes` are the engine's device memory, `caches` the
    sizes of its caches in bytes, by name. The footprints are the memory of the engine process
    and of the front as the system counts it; None if it does not say.
    """

    seconds: float
    requests: int
    users: int
    active_bytes: int
    pool_bytes: int
    peak_bytes: int
    caches: dict[str, int]
    engine_footprint_bytes: int | None
    front_footprint_bytes: int | None
    tracked: int
    in_flight: int
    restarts: int

    @property
    def footprint_bytes(self) -> int | None:
        """The footprint of both processes; of the engine only if the front's is unknown."""
        if self.engine_footprint_bytes is None:
            return None
        return self.engine_footprint_bytes + (self.front_footprint_bytes or 0)


class Readings:
    """Reads the daemon at `url` once a second; `count` gives (requests ended, users asking)."""

    def __init__(self, url: str, count: Callable[[], tuple[int, int]]) -> None:
        self._url = f"{url}/v1/status"
        self._count = count
        self._start = time.perf_counter()
        self.all: list[Reading] = []

    async def watch(self) -> None:
        """Read until cancelled."""
        while True:
            await self.read()
            await asyncio.sleep(_PERIOD_SECONDS)

    async def read(self) -> Reading | None:
        """Take one reading; None if the daemon or its engine does not answer."""
        seconds = time.perf_counter() - self._start
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=10) as http:
                status = (await http.get(self._url)).raise_for_status().json()
        except httpx.HTTPError:
            return None
        if status["engine"]["pid"] is None or status["engine"]["stats"] is None:
            return None
        requests, users = self._count()
        reading = read_status(status, seconds, requests, users)
        self.all.append(reading)
        return reading


def read_status(status: Any, seconds: float, requests: int, users: int) -> Reading:
    """A reading from the JSON of `/v1/status`, which must have the engine's stats."""
    engine, stats = status["engine"], status["engine"]["stats"]
    memory = stats["memory"]
    return Reading(
        seconds=round(seconds, 3),
        requests=requests,
        users=users,
        active_bytes=memory["active_bytes"],
        pool_bytes=memory["pool_bytes"],
        peak_bytes=memory["peak_bytes"],
        caches={cache["name"]: cache["size_bytes"] for cache in stats["caches"]},
        engine_footprint_bytes=memory["footprint_bytes"] or None,
        front_footprint_bytes=resident_bytes(parent(engine["pid"])),
        tracked=sum(stats["tracked_by"].values()),
        in_flight=status["requests"]["in_flight"],
        restarts=engine["restarts"],
    )


def resident_bytes(pid: int | None) -> int | None:
    """Resident memory of a process (Linux); None if the system does not say."""
    with contextlib.suppress(OSError):
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    return None


def parent(pid: int) -> int | None:
    """The parent process (Linux); None if the system does not say."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None
