"""An idle daemon uses almost no processor time."""

from __future__ import annotations

import sys
import time

import pytest

from tests.e2e.idle import family_of, measure
from tests.support.daemons import Daemon

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.alone,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

MOST_OF_A_CORE = 0.005
MOST_WAKEUPS = 5.0
"""Per second. A process that polls ten times a second has twice as many."""


def test_idle_daemon_uses_almost_no_processor_time(daemon: Daemon) -> None:
    daemon.wait_idle()
    pids = family_of(daemon.process.pid)
    assert daemon.engine_pid() in pids
    time.sleep(3)  # what the last requests have left to do
    costs = [measure(pids, 5.0) for _ in range(3)]
    best = min(costs, key=lambda cost: cost.core_share)
    assert best.core_share < MOST_OF_A_CORE, best
    assert min(cost.wakeups_per_second for cost in costs) < MOST_WAKEUPS, costs
