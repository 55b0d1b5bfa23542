"""The engine is killed, suspended, cut off and hangs, in every state of a request.

Each client gets exactly one end, nothing is left behind, and the next request is answered. The
scripted engine reaches the state in question; the front is the real one.
`test_real_engine_death.py` kills the real engine."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.attack.front import Front, running_front
from tests.support.waiting import until
from vlm_server.protocol import EncodedSubmit
from vlm_server.settings import Limits

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

STATES = {
    "waiting": "wait",
    "preparing": "accept",
    "encoding": "accept encode",
    "prefill": "accept encode prefill",
    "decode": "accept encode prefill token",
}
BIG = "wait " + "x" * 3_000_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front() -> AsyncIterator[Front]:
    """One front for most tests; each leaves it ready."""
    async with running_front() as running:
        yield running


@pytest.mark.parametrize(
    ("state", "death"),
    [
        *((state, "die") for state in STATES),
        *(pytest.param(state, "stop", marks=pytest.mark.whole) for state in STATES),
    ],
)
async def test_engine_death_gives_each_client_exactly_one_error(
    front: Front, state: str, death: str
) -> None:
    pid, script = front.supervisor.status.pid, STATES[state]
    victims = [front.begin(script, stream=stream) for stream in (True, False)]
    await until(lambda: len(front.supervisor.tracked["streams"]) == 2, 10)  # type: ignore[arg-type]
    killer = front.begin(f"{script} {death}", stream=True)
    answers = await asyncio.wait_for(asyncio.gather(*victims, killer), 30)
    assert [answer.terminals for answer in answers] == [["engine_died"]] * 3
    streamed, whole, _ = answers
    assert whole.status == 502
    assert streamed.status == (200 if state == "decode" else 502)
    await front.until_replaced(pid)
    await front.check_clean()


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
async def test_engine_death_between_requests_is_recovered(
    front: Front, death: signal.Signals
) -> None:
    await front.check_clean()
    pid = front.supervisor.status.pid
    assert pid is not None
    os.kill(pid, death)
    answer = await front.ask("accept prefill token finish")
    assert answer.status in (502, 503) if death is signal.SIGSTOP else (200, 502, 503)
    await front.until_replaced(pid)
    await front.check_clean()


async def test_hung_engine_writes_its_stacks_before_being_killed(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with running_front() as front:
        pid = front.supervisor.status.pid
        with caplog.at_level(logging.ERROR):
            answer = await front.ask("accept encode hang")
            await front.until_replaced(pid)
        assert answer.terminals == ["engine_died"]
        assert "inference hangs" in caplog.text
        stacks = capfd.readouterr().err
        assert "most recent call first" in stacks
        assert "scripted_worker.py" in stacks
        await front.check_clean()


async def test_stopped_engine_is_logged_as_stopped(
    front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    pid = front.supervisor.status.pid
    with caplog.at_level(logging.ERROR):
        await front.ask("accept encode stop")
        await front.until_replaced(pid)
    assert "has stopped it" in caplog.text
    await front.check_clean()


@pytest.mark.parametrize(
    "kind", ["hang-encoder", pytest.param("hang-preparer", marks=pytest.mark.whole)]
)
async def test_hung_side_thread_is_detected_while_inference_works(
    front: Front, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Even after the hanging request was cancelled, while others are answered."""
    pid = front.supervisor.status.pid
    left = front.begin(f"accept {kind}")
    await until(lambda: bool(front.supervisor._watchdog._ages), 10)
    left.cancel()
    with caplog.at_level(logging.ERROR):
        while front.supervisor.status.pid == pid:
            await front.ask("accept prefill token finish")
            await asyncio.sleep(0.05)
    assert f"{kind.removeprefix('hang-')}" in caplog.text
    await front.until_replaced(pid)
    await front.check_clean()


async def test_cut_engine_socket_ends_every_request_once(front: Front) -> None:
    pid = front.supervisor.status.pid
    answers = await asyncio.gather(front.begin("accept token"), front.begin("accept token cut"))
    assert [answer.terminals for answer in answers] == [["engine_died"]] * 2
    await front.until_replaced(pid)
    await front.check_clean()


async def test_new_requests_do_not_keep_hung_engine_alive(front: Front) -> None:
    pid = front.supervisor.status.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    pending = []
    while front.supervisor.status.pid == pid:
        pending.append(front.begin("accept prefill token finish"))
        await asyncio.sleep(0.1)
        assert len(pending) < 200, "it is never replaced"
    for answer in await asyncio.gather(*pending):
        assert answer.terminals in (["engine_died"], ["engine_unavailable"])
    await front.check_clean()


async def test_disconnected_clients_free_their_slots_on_stopped_engine() -> None:
    """They take every slot, with large bodies that the engine does not read."""
    async with running_front(Limits(max_requests=6), silence_timeout_seconds=2.0) as front:
        pid = front.supervisor.status.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        tasks = [front.begin(BIG) for _ in range(6)]
        await until(lambda: len(front.supervisor.tracked["streams"]) == 6, 20)  # type: ignore[arg-type]
        assert (await front.ask("one too many")).status == 429
        for task in tasks:
            task.cancel()
        await until(lambda: not front.supervisor.tracked["streams"], 10)
        assert await front.in_flight() == 0
        assert front.supervisor.status.pid == pid, "it was replaced before they had left"
        process = front.supervisor._process
        assert process is not None
        kept = [message for message in process._outbox if isinstance(message, EncodedSubmit)]
        assert len(kept) <= 1, "bodies of those who left are kept"
        others = len(process._outbox) - len(kept)
        assert others <= 6, "more than the news that each of them has left"
        while await front.is_ready():  # noqa: ASYNC110  it is tasks over HTTP
            await asyncio.sleep(0.05)
        assert front.supervisor.status.pid == pid, "it was not ready before it was replaced"
        await front.until_replaced(pid)
        await front.check_clean()


async def test_request_to_unresponsive_engine_is_503_with_retry_after() -> None:
    async with running_front(silence_timeout_seconds=2.0) as front:
        waiting = front.begin("accept stop")
        while await front.is_ready():  # noqa: ASYNC110  it is asked over HTTP
            await asyncio.sleep(0.05)
        response = await front.http.get("/health/ready")
        assert response.json()["status"] == "unresponsive"
        assert 1 <= int(response.headers["retry-after"]) <= 10
        refused = await front.ask("accept prefill token finish")
        assert (refused.status, refused.terminals) == (503, ["engine_unavailable"])
        assert (await waiting).terminals == ["engine_died"]
        await front.check_clean()


async def test_engine_start_without_descriptors_is_tried_again(front: Front) -> None:
    pid = front.supervisor.status.pid
    assert pid is not None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    restarts = front.supervisor.status.restarts
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        os.kill(pid, signal.SIGKILL)
        await until(lambda: front.supervisor.status.restarts >= restarts + 2, 20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await front.until_replaced(pid)
    await front.check_clean()


# ---- quarantine ------------------------------------------------------------------------


SUSPECT = " " * 20_000
"""Long enough not to be small text."""


async def test_suspect_is_accepted_after_two_deaths_and_cleared_by_success() -> None:
    async with running_front() as front:
        for _ in range(2):
            pid = front.supervisor.status.pid
            assert (await front.ask(f"accept prefill die{SUSPECT}")).terminals == ["engine_died"]
            await front.until_replaced(pid)
        answer = await front.ask(f"accept prefill token finish{SUSPECT}")
        assert (answer.status, answer.terminals) == (200, ["stop"])
        pid = front.supervisor.status.pid
        await front.ask(f"accept prefill die{SUSPECT}")
        await front.until_replaced(pid)
        (record,) = front.supervisor._quarantine._records.values()
        assert record.num_crashes == 1
        await front.check_clean()


async def test_request_that_kills_engine_alone_is_quarantined() -> None:
    async with running_front() as front:
        for _ in range(3):
            pid = front.supervisor.status.pid
            await front.ask(f"accept prefill die{SUSPECT}")
            await front.until_replaced(pid)
        refused = await front.ask(f"accept prefill die{SUSPECT}")
        assert (refused.status, refused.terminals) == (413, ["request_too_costly"])
        assert front.supervisor.status.restarts == 3
        await front.check_clean()


async def test_hanging_request_is_suspect_after_its_client_left() -> None:
    async with running_front() as front:
        for _ in range(2):
            pid = front.supervisor.status.pid
            left = front.begin(f"accept prefill hang{SUSPECT}")
            await until(lambda: bool(front.supervisor._quarantine._working), 10)
            left.cancel()
            await front.until_replaced(pid)
        (record,) = front.supervisor._quarantine._records.values()
        assert record.num_crashes == 2
        await front.check_clean()


async def test_stopped_engine_makes_no_request_suspect() -> None:
    async with running_front() as front:
        for _ in range(2):
            pid = front.supervisor.status.pid
            await front.ask(f"accept prefill stop{SUSPECT}")
            await front.until_replaced(pid)
        assert not front.supervisor._quarantine._records
        await front.check_clean()
