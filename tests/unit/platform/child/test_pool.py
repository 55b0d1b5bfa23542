"""Processes that are killed when a job takes too long, is cancelled, or kills them."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vlm_server.platform.child import launch, messages
from vlm_server.platform.child.cancellation import Cancellation, Cancelled
from vlm_server.platform.child.messages import Parts
from vlm_server.platform.child.pool import ChildFailed, ChildPool, ChildTimeout

MODULE = "tests.unit.platform.child.echo"
ROOT = str(Path(__file__).parents[4])


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChildPool]:
    monkeypatch.setenv("PYTHONPATH", ROOT)
    child_pool = ChildPool(MODULE, 2)
    yield child_pool
    child_pool.close()
    assert child_pool.num_tracked == 0


def ask(pool: ChildPool, job: str, seconds: float = 5.0) -> str:
    return pool.run(job.encode(), seconds, Cancellation()).decode()


def test_single_child_process_answers_many_jobs(pool: ChildPool):
    assert ask(pool, "echo hello") == "hello"
    assert ask(pool, "pid -") == ask(pool, "pid -")


def test_child_process_may_return_large_answer(pool: ChildPool):
    text = "x" * (5 << 20)
    assert ask(pool, f"echo {text}") == text


def test_output_printed_in_child_is_not_its_answer(pool: ChildPool):
    assert ask(pool, "print hello") == ""
    assert ask(pool, "echo next") == "next"


def test_job_past_its_timeout_is_killed_and_next_one_served(pool: ChildPool):
    started = time.monotonic()
    with pytest.raises(ChildTimeout):
        ask(pool, "sleep 30", seconds=0.3)
    assert time.monotonic() - started < 5
    assert ask(pool, "echo next") == "next"


@pytest.mark.parametrize("job", ["exit 0", "exit 3", f"allocate {4 << 30}"])
def test_dying_child_process_fails_only_its_job(pool: ChildPool, job: str):
    with pytest.raises(ChildFailed):
        ask(pool, job)
    assert ask(pool, "echo next") == "next"


def test_idle_child_process_is_replaced_after_its_death(pool: ChildPool):
    os.kill(int(ask(pool, "pid -")), 9)
    time.sleep(0.1)
    assert ask(pool, "echo next") == "next"


def test_child_process_with_much_memory_is_replaced(pool: ChildPool):
    first = ask(pool, "pid -")
    assert ask(pool, f"allocate {300 << 20}") == "x"
    assert ask(pool, "pid -") != first


def test_memory_of_parent_does_not_replace_child_process(pool: ChildPool):
    held = bytearray(b"x" * (300 << 20))
    first = ask(pool, "pid -")
    assert ask(pool, "pid -") == first
    del held


def test_parts_of_job_arrive_as_one_message(pool: ChildPool):
    job = Parts(7, [b"echo ", bytearray(b"a"), b"b"])
    assert pool.run(job, 5, Cancellation()) == b"ab"


def test_cancellation_kills_child_and_frees_its_place(pool: ChildPool):
    outcomes: list[type[Exception]] = []
    cancellations = [Cancellation() for _ in range(3)]

    def run(cancellation: Cancellation) -> None:
        try:
            pool.run(b"sleep 30", 60, cancellation)
        except (ChildFailed, ChildTimeout, Cancelled) as error:
            outcomes.append(type(error))

    threads = [threading.Thread(target=run, args=(one,)) for one in cancellations]
    for thread in threads:
        thread.start()
    while pool.num_tracked < 3:
        time.sleep(0.01)
    for cancellation in cancellations:  # two work, one waits for a process
        cancellation.cancel()
    for thread in threads:
        thread.join(5)
    assert outcomes == [Cancelled] * 3
    assert pool.num_tracked == 0
    assert ask(pool, "echo next") == "next"


def test_job_cancelled_before_its_start_is_not_run(pool: ChildPool):
    cancellation = Cancellation()
    cancellation.cancel()
    with pytest.raises(Cancelled):
        pool.run(b"sleep 30", 60, cancellation)


def test_pool_never_exceeds_its_number_of_processes(pool: ChildPool):
    started = time.monotonic()
    threads = [threading.Thread(target=ask, args=(pool, "sleep 0.4")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started > 0.8


def test_child_process_imports_nothing_from_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "queue.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", ".", ROOT]))
    pool = ChildPool(MODULE, 1)
    path = ask(pool, "path -")
    pool.close()
    assert str(tmp_path) not in path
    assert launch.environment()["PYTHONPATH"] == ROOT


@pytest.mark.parametrize("system", ["this one", "a stand-in for macOS"])
def test_child_process_ends_with_its_parent(monkeypatch: pytest.MonkeyPatch, system: str):
    """At once, in the middle of a job."""
    stand_in = [f"{ROOT}/tests/as_mac/site"] if system != "this one" else []
    if stand_in and sys.platform != "linux":
        pytest.skip("it is for Linux")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*stand_in, ROOT]))
    pipe = subprocess.PIPE
    started = subprocess.Popen(
        launch.command(MODULE), stdin=pipe, stdout=pipe, env=launch.environment()
    )
    with started as process:
        assert process.stdin is not None
        messages.write(process.stdin, b"sleep 60")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.stdin.close()
        assert process.wait(10) == 1


def test_answer_of_several_parts_is_sent_with_description():
    sent = io.BytesIO()
    messages.write(sent, messages.describe(4, (b"ab", b"cd"), b"four letters"))
    sent.seek(0)
    data, description = messages.split(messages.read(sent)[0])
    assert (bytes(data), bytes(description)) == (b"abcd", b"four letters")


@pytest.mark.parametrize("answer", [b"", b"\0\0\0", b"\0\0\0\1", b"abc\0\0\0\4"])
def test_answer_without_description_raises(answer: bytes):
    with pytest.raises(ValueError, match="description"):
        messages.split(bytearray(answer))


def test_jobs_leave_no_threads_behind(pool: ChildPool):
    threads = [threading.Thread(target=ask, args=(pool, "sleep 0.1")) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    before = threading.active_count()
    for _ in range(20):
        ask(pool, "echo a")
    assert threading.active_count() <= before


def test_running_job_counts_as_progress(pool: ChildPool):
    """The job ends at its own deadline, so no watchdog has to end it."""
    cancellation = Cancellation()
    thread = threading.Thread(target=pool.run, args=(b"sleep 3", 10, cancellation))
    thread.start()
    while not pool.num_tracked:
        time.sleep(0.01)
    before = cancellation.num_checks()
    time.sleep(1.5)
    assert cancellation.num_checks() != before
    thread.join()
