"""A Mac stays awake while requests are in flight, and no longer."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.daemons import is_alive
from tests.support.waiting import until
from vlm_server.api.http.queue.queue_slots import QueueSlots
from vlm_server.platform import awake
from vlm_server.settings import Limits


@pytest.fixture
def caffeinate_pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """A function to the ids of all `caffeinate` processes started so far."""
    log = tmp_path / "log"
    log.touch()
    program = tmp_path / "caffeinate"
    program.write_text(f'#!/bin/sh\n[ "$1" = -i ] && echo $$ >> {log}\nshift\nexec "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(awake, "_CAFFEINATE", str(program))
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(awake, "_LINGER_SECONDS", 0.3)
    return lambda: [int(word) for word in log.read_text().split()]


async def test_mac_stays_awake_while_any_request_is_in_flight(
    caffeinate_pids: Callable[[], list[int]],
):
    slots = QueueSlots(Limits())
    with slots.hold("me", 1):
        with slots.hold("me", 1):
            await until(lambda: len(caffeinate_pids()) == 1)
        await asyncio.sleep(0.5)
        assert is_alive(caffeinate_pids()[0])
    with slots.hold("me", 1):  # the next one comes soon
        await asyncio.sleep(0.5)
        assert is_alive(caffeinate_pids()[0])
    await until(lambda: not is_alive(caffeinate_pids()[0]))
    with slots.hold("me", 1):
        await until(lambda: len(caffeinate_pids()) == 2)
    await until(lambda: not is_alive(caffeinate_pids()[1]))


async def test_caffeinate_pipe_is_not_inherited(caffeinate_pids: Callable[[], list[int]]):
    """So `caffeinate` ends with the front, even if other children live on."""
    holding = awake.Awake()
    holding.hold()
    await until(lambda: len(caffeinate_pids()) == 1)
    assert holding._holder is not None
    assert holding._holder.stdin is not None
    assert not os.get_inheritable(holding._holder.stdin.fileno())
    holding._holder.stdin.close()
    await until(lambda: holding._holder is not None and holding._holder.poll() is not None)


async def test_requests_are_served_without_caffeinate(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(awake, "_CAFFEINATE", "/nowhere/caffeinate")
    slots = QueueSlots(Limits())
    with slots.hold("me", 1):
        assert slots.requests.taken == 1
    assert slots.requests.taken == 0
