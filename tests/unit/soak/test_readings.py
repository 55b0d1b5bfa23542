"""Readings combine the daemon's status with footprints of the system."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from tests.soak.readings import Readings, parent, read_status, resident_bytes


def status(**stats: Any) -> dict[str, Any]:
    memory = {"active_bytes": 1, "pool_bytes": 2, "peak_bytes": 3, "footprint_bytes": 1000}
    sizes = {"memory": memory, "tracked_by": {"scheduler": 3, "runner": 1}}
    caches = [{"name": "prefix", "size_bytes": 5, "entries": 9}]
    engine = {"pid": os.getpid(), "restarts": 6, "stats": sizes | {"caches": caches} | stats}
    return {"requests": {"in_flight": 7, "limit": 64}, "engine": engine}


def test_reading_is_parsed_from_status():
    reading = read_status(status(), 1.5, 10, 3)
    assert (reading.seconds, reading.requests, reading.users) == (1.5, 10, 3)
    assert (reading.active_bytes, reading.pool_bytes, reading.peak_bytes) == (1, 2, 3)
    assert (reading.tracked, reading.restarts, reading.in_flight) == (4, 6, 7)
    assert reading.caches == {"prefix": 5}


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_front_footprint_is_resident_bytes_of_parent():
    reading = read_status(status(), 0, 0, 0)
    resident = resident_bytes(os.getppid())
    assert reading.front_footprint_bytes == pytest.approx(resident, abs=1 << 20)
    assert parent(os.getpid()) == os.getppid()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_total_footprint_sums_engine_and_front():
    reading = read_status(status(), 0, 0, 0)
    assert reading.engine_footprint_bytes == 1000
    assert reading.footprint_bytes == 1000 + (reading.front_footprint_bytes or 0)


def test_footprint_of_missing_process_is_unknown():
    assert resident_bytes(2**22 + 1) is None
    assert parent(2**22 + 1) is None


async def test_readings_skip_unreachable_daemon():
    readings = Readings("http://127.0.0.1:9", lambda: (0, 0))
    assert await readings.read() is None
    assert readings.all == []
