"""A daemon in little memory answers every request in order, and returns the memory."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image as PillowImage

from tests.support.daemons import Daemon, running_daemon, wait_until

SIZE = (1024, 768)
LARGEST = (8000, 6250)
"""`limits.max_image_pixels`."""
NUM_IMAGES = 16
MANY = 8
"""More than the small daemon answers at once."""


def image(seed: int, size: tuple[int, int] = SIZE) -> dict[str, Any]:
    """An image of its own for each seed."""
    width, height = size
    block = max(8, width // 128)
    blocks = np.random.default_rng(1000 + seed).integers(
        0, 255, (height // block, width // block, 3), dtype=np.uint8
    )
    buffer = io.BytesIO()
    whole = PillowImage.fromarray(blocks).resize(size, PillowImage.Resampling.NEAREST)
    whole.save(buffer, "PNG", compress_level=1)
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def ask(
    daemon: Daemon, seed: int, max_tokens: int = 8, n: int = 1, size: tuple[int, int] = SIZE
) -> Any:
    return ask_about(daemon, image(seed, size), max_tokens, n)


def ask_about(daemon: Daemon, shown: dict[str, Any], max_tokens: int = 8, n: int = 1) -> Any:
    parts = [shown, {"type": "text", "text": "What shape is this?"}]
    return daemon.client().chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": parts}],  # type: ignore[typeddict-item, list-item]
        temperature=0,
        max_tokens=max_tokens,
        n=n,
    )


def timed(daemon: Daemon, shown: dict[str, Any]) -> float:
    """The time at which the answer was complete."""
    assert ask_about(daemon, shown).choices[0].message.content is not None
    return time.monotonic()


def num_received(daemon: Daemon, answers: list[Future[float]]) -> int:
    in_flight = int(daemon.status()["requests"]["in_flight"])
    return in_flight + sum(answer.done() for answer in answers)


def memory(daemon: Daemon) -> dict[str, Any]:
    found: dict[str, Any] = daemon.status()["engine"]["stats"]["memory"]
    return found


@pytest.fixture(scope="module")
def memory_needs(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, int]:
    """The baseline bytes, and the peak of one request with a largest image."""
    with running_daemon(tmp_path_factory.mktemp("needs")) as fresh:
        ask(fresh, -1)
        fresh.wait_idle()
        reading = memory(fresh)
    return reading["baseline_bytes"], reading["peak_bytes"] - reading["baseline_bytes"]


@pytest.fixture(scope="module")
def small_daemon(
    memory_needs: tuple[int, int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Daemon, int]]:
    """A daemon with half as much memory again as one largest request needs at its peak."""
    baseline, one = memory_needs
    limit = baseline + 3 * one // 2
    folder: Path = tmp_path_factory.mktemp("small")
    settings = (
        f"memory.max_bytes={limit}",
        "memory.idle_clear_seconds=1",
        "limits.max_requests=32",
    )
    arguments = [part for setting in settings for part in ("--set", setting)]
    with running_daemon(folder, *arguments) as running:
        yield running, limit


@pytest.mark.whole
def test_largest_images_in_little_memory_are_all_answered(small_daemon: tuple[Daemon, int]):
    daemon, limit = small_daemon
    with ThreadPoolExecutor(MANY) as threads:
        answers = list(threads.map(lambda seed: ask(daemon, seed), range(MANY)))
    assert all(answer.choices[0].message.content is not None for answer in answers)
    status = daemon.status()["engine"]
    assert status["restarts"] == 0
    assert status["stats"]["memory"]["decisions"]["wait"] > 0
    assert status["stats"]["memory"]["peak_bytes"] <= limit * 1.05


@pytest.mark.whole
def test_sixteen_largest_images_are_answered_in_order_in_tight_memory(tmp_path: Path):
    """Three requests fit; all arrive one after the other, faster than they are answered."""
    (tmp_path / "one").mkdir()
    with running_daemon(tmp_path / "one") as fresh:
        ask(fresh, 400, size=LARGEST)
        fresh.wait_idle()
        alone = memory(fresh)
    limit = alone["baseline_bytes"] + 3 * (alone["peak_bytes"] - alone["baseline_bytes"])
    images = [image(401 + number, LARGEST) for number in range(NUM_IMAGES)]
    with (
        running_daemon(tmp_path, "--set", f"memory.max_bytes={limit}") as daemon,
        ThreadPoolExecutor(NUM_IMAGES) as threads,
    ):
        answers = []
        for shown in images:
            answers.append(threads.submit(timed, daemon, shown))
            wait_until(lambda: num_received(daemon, answers) == len(answers), 20, daemon.log)
            time.sleep(0.2)
        ends = [answer.result() for answer in answers]
        status = daemon.status()["engine"]
    places = np.argsort(np.argsort(ends))
    assert np.abs(places - np.arange(NUM_IMAGES)).max() <= 2, "neighbours are prepared at once"
    assert status["restarts"] == 0
    assert status["stats"]["memory"]["peak_bytes"] <= 1.05 * limit


@pytest.mark.whole
def test_request_over_memory_is_413_with_figures(small_daemon: tuple[Daemon, int]):
    daemon, _ = small_daemon
    with pytest.raises(openai.APIStatusError) as caught:
        ask(daemon, 100, max_tokens=1500, n=8)
    assert caught.value.status_code == 413
    assert caught.value.code == "memory_exceeded"
    assert "MiB" in caught.value.message
    assert ask(daemon, 101).choices


@pytest.mark.alone
def test_memory_returns_within_two_seconds_after_burst(small_daemon: tuple[Daemon, int]):
    daemon, _ = small_daemon
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda seed: ask(daemon, seed, max_tokens=40), range(200, 208)))
    time.sleep(2)
    reading, caches = memory(daemon), daemon.status()["engine"]["stats"]["caches"]
    cached = sum(
        cache["size_bytes"] for cache in caches if cache["name"] in ("encoder", "tile", "prefix")
    )
    assert reading["active_bytes"] <= 1.01 * (reading["baseline_bytes"] + cached)
    assert reading["pool_bytes"] <= 32 << 20
    assert set(daemon.status()["engine"]["stats"]["tracked_by"].values()) == {0}


@pytest.mark.whole
def test_idle_daemon_clears_memory_once(tmp_path: Path):
    with running_daemon(tmp_path, "--set", "memory.idle_clear_seconds=1") as daemon:
        for seed in range(300, 303):
            ask(daemon, seed)
            assert not memory(daemon)["decisions"].get("clear_idle"), (
                "requests come before it is due"
            )
        wait_until(lambda: memory(daemon)["decisions"].get("clear_idle") == 1, 5, daemon.log)
        time.sleep(2.5)
        assert memory(daemon)["decisions"]["clear_idle"] == 1
        assert memory(daemon)["pool_bytes"] < 32 << 20


@pytest.mark.whole
def test_ample_memory_is_not_cleared_between_requests(tmp_path: Path):
    with running_daemon(tmp_path) as daemon:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda seed: ask(daemon, seed, max_tokens=40), range(500, 512)))
        daemon.wait_idle()
        reading = memory(daemon)
    assert reading["decisions"] == {}
    assert reading["clear_seconds"] == 0
