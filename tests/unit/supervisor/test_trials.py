"""A suspect request runs alone on the device; later requests wait and continue in order."""

from __future__ import annotations

import asyncio

import pytest

from vlm_server.errors import RequestTooCostly
from vlm_server.supervisor import engine_streams
from vlm_server.supervisor.engine_streams import Trials


def innocent() -> bool:
    return False


def suspect() -> bool:
    return True


async def settled(task: asyncio.Task[bool]) -> bool:
    """Whether a turn was given by now."""
    for _ in range(10):
        await asyncio.sleep(0)
    return task.done()


def turn(trials: Trials, name: str, is_suspect: bool = False) -> asyncio.Task[bool]:
    return asyncio.create_task(trials.wait_for_turn(name, suspect if is_suspect else innocent))


async def test_requests_do_not_wait_without_suspect() -> None:
    trials = Trials()
    for name in "abc":
        assert not await trials.wait_for_turn(name, innocent)


async def test_suspect_waits_for_running_requests_and_blocks_later_ones() -> None:
    trials = Trials()
    await trials.wait_for_turn("starting", innocent)
    await trials.wait_for_turn("answering", innocent)
    trials.record_token("answering")
    tried, later = turn(trials, "tried", True), turn(trials, "later")
    assert not await settled(tried)
    trials.record_token("starting")
    assert not await settled(tried)
    trials.remove("starting")
    trials.remove("answering")
    assert await settled(tried)
    assert tried.result()
    assert not await settled(later)
    trials.record_token("tried")
    assert await settled(later)
    assert not later.result()


async def test_trial_waits_for_prompts_but_not_long_for_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_streams, "_PATIENCE_SECONDS", 0.05)
    made = Trials()
    await made.wait_for_turn("starting", innocent)
    await made.wait_for_turn("answering", innocent)
    made.record_token("answering")
    tried = turn(made, "tried", True)
    await asyncio.sleep(0.2)
    assert not tried.done()
    made.record_token("starting")
    assert await settled(tried)


async def test_trials_run_in_turn_and_next_is_rechecked() -> None:
    trials = Trials()
    answers = iter([True, False])
    first = asyncio.create_task(trials.wait_for_turn("first", lambda: next(answers)))
    second = asyncio.create_task(trials.wait_for_turn("second", lambda: next(answers)))
    assert await settled(first)
    assert not await settled(second)
    trials.record_token("first")
    assert await settled(second)
    assert (first.result(), second.result()) == (True, False)


async def test_cancelled_suspect_unblocks_waiting_requests() -> None:
    trials = Trials()
    await trials.wait_for_turn("busy", innocent)
    tried, later = turn(trials, "tried", True), turn(trials, "later")
    assert not await settled(later)
    tried.cancel()
    assert await settled(later)
    trials.remove("busy")
    trials.remove("later")
    assert await trials.wait_for_turn("tried again", suspect)
    assert trials.request_id == "tried again"
    trials.remove("tried again")
    assert trials.request_id is None
    assert not await trials.wait_for_turn("last", innocent)


async def test_refused_suspect_blocks_no_later_request() -> None:
    def refused() -> bool:
        raise RequestTooCostly("no")

    trials = Trials()
    with pytest.raises(RequestTooCostly):
        await trials.wait_for_turn("refused", refused)
    assert not await trials.wait_for_turn("next", innocent)


async def test_engine_end_releases_all_waiting_requests() -> None:
    trials = Trials()
    await trials.wait_for_turn("busy", innocent)
    tried, later = turn(trials, "tried", True), turn(trials, "later")
    assert not await settled(tried)
    trials.clear()
    assert await settled(tried)
    assert await settled(later)
