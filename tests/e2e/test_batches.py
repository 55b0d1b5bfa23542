"""Interactive requests beside a full lane of batches, and without it, in turn."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemons import Daemon, running_daemon, wait_until, with_settings
from tests.unit.api.requests import ROUTE, chat, user

NUM_PAIRS = 12
MAX_RATIO = 1.1
MARGINS = {"first token": 0.01, "between tokens": 0.001}
"""Seconds beyond the goal, for a busy machine: the step under way, and KV that is stored."""


class Lane:
    """A batch of endless answers, while the `with` block runs."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon, self.client = daemon, daemon.client()

    def __enter__(self) -> None:
        body = chat(user("Count from 1."), max_tokens=4000, ignore_eos=True)
        lines = [
            {"custom_id": str(i), "method": "POST", "url": ROUTE, "body": body} for i in range(8)
        ]
        data = "\n".join(map(json.dumps, lines)).encode()
        file = self.client.files.create(file=("b.jsonl", data), purpose="batch")
        endpoint: Any = ROUTE
        batch = self.client.batches.create(
            input_file_id=file.id, endpoint=endpoint, completion_window="24h"
        )
        self.batch_id = batch.id

        def is_full() -> bool:
            requests = self.daemon.status()["requests"]["list"]
            return [each["state"] for each in requests].count("decode") == 4

        wait_until(is_full, 20, self.daemon.log)

    def __exit__(self, *_: object) -> None:
        self.client.batches.cancel(self.batch_id)
        wait_until(
            lambda: self.client.batches.retrieve(self.batch_id).status == "cancelled",
            20,
            self.daemon.log,
        )
        self.daemon.wait_idle()


def timed(daemon: Daemon, number: int) -> tuple[float, float]:
    """Seconds to the first token of an answer, and on average between two of its tokens."""
    words = " ".join(f"{number}-{i}" for i in range(400))  # in no cache
    messages: Any = [user(words)]
    start = time.perf_counter()
    stream = daemon.client().chat.completions.create(
        model="demo", messages=messages, stream=True, max_tokens=40, extra_body={"ignore_eos": True}
    )
    times = [time.perf_counter() for chunk in stream if chunk.choices]
    return times[0] - start, (times[-1] - times[0]) / (len(times) - 1)


@pytest.mark.alone
def test_full_lane_delays_no_request(tmp_path: Path) -> None:
    settings = with_settings("batches.min_idle_seconds=0", "batches.on_battery=true")
    with running_daemon(tmp_path, *settings) as daemon:
        timed(daemon, 0)
        without, beside = list[tuple[float, float]](), list[tuple[float, float]]()
        for number in range(1, NUM_PAIRS + 1):
            without.append(timed(daemon, 2 * number))
            with Lane(daemon):
                beside.append(timed(daemon, 2 * number + 1))
    for index, (name, margin_seconds) in enumerate(MARGINS.items()):
        before = statistics.median(pair[index] for pair in without)
        after = statistics.median(pair[index] for pair in beside)
        spread = sorted(pair[index] for pair in beside)
        print(f"{name}: without {1e3 * before:.1f} ms, beside {1e3 * after:.1f} ms, ", end="")
        print(f"ratio {after / before:.2f}, {1e3 * spread[1]:.1f} to {1e3 * spread[-2]:.1f}")
        assert after <= MAX_RATIO * before + margin_seconds
