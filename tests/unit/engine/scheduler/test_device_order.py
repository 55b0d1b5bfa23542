"""The oldest and the shortest request take turns, and the wait of each is bounded."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.driver import SteppedEngine
from vlm_server.engine.scheduler.device_order import TurnCandidate, fair_turn


@dataclass
class Job:
    name: str
    left: int
    is_begun: bool = False
    num_seqs: int = 1


class Queue:
    """Jobs in the order in which they came; one unit of one of them is done in a turn."""

    def __init__(self) -> None:
        self.last: str | None = None
        self.jobs: list[Job] = []
        self.done: list[str] = []

    def add(self, name: str, left: int, num_seqs: int = 1) -> None:
        self.jobs.append(Job(name, left, num_seqs=num_seqs))

    def turn(self, room: int = 2) -> str | None:
        waiting = [
            TurnCandidate(job.name, job.left, job.is_begun, job.num_seqs) for job in self.jobs
        ]
        name = fair_turn(waiting, self.last, room)
        self.last = name or self.last
        for job in [job for job in self.jobs if job.name == name]:
            job.left, job.is_begun = job.left - 1, True
            if not job.left:
                self.jobs.remove(job)
                self.done.append(job.name)
        begun = [job.num_seqs for job in self.jobs if job.is_begun]
        assert len(begun) <= 2
        assert sum(begun) <= room
        return name

    def run(self, room: int = 2) -> str:
        """The order of all turns, a letter each."""
        order = ""
        while name := self.turn(room):
            order += name
        return order


def queue(**jobs: int) -> Queue:
    job_queue = Queue()
    for name, left in jobs.items():
        job_queue.add(name, left)
    return job_queue


def test_equal_requests_run_in_order_of_arrival():
    assert queue(a=3, b=3, c=3).run() == "aaabbbccc"


def test_short_request_runs_between_turns_of_long_one():
    assert queue(a=5, b=1).run() == "abaaaa"
    assert queue(a=6, b=2).run() == "ababaaaa"


def test_shortest_request_runs_once_begun_ones_are_finished():
    assert queue(a=9, b=3, c=2).run() == "acacababab" + "aaaa"
    job_queue = queue(a=9, b=3)
    assert [job_queue.turn(), job_queue.turn()] == ["a", "b"]
    job_queue.add("c", 1)
    assert job_queue.run().startswith("ababac")


def test_request_without_rows_goes_on_while_oldest_waits_for_room():
    chat = TurnCandidate("a", 9, is_begun=False, num_seqs=1)
    scoring = TurnCandidate("b", 500, is_begun=False, num_seqs=0)
    assert fair_turn([chat, scoring], None, room=0) == "b"


def test_interrupted_request_remains_oldest():
    young = [
        TurnCandidate("b", 500, is_begun=True, num_seqs=1),
        TurnCandidate("c", 400, True, num_seqs=1),
    ]
    old = TurnCandidate("a", 900, is_begun=False, num_seqs=1)
    assert fair_turn(young, "b", room=4) == "c"
    assert fair_turn([old, *young], "b", room=4) == "a"
    assert fair_turn([old, *young], "a", room=4) == "c"
    assert fair_turn([old, *young], "a", room=2) != "a", "its row is another's"


def test_query_of_next_request_takes_no_turn():
    engine = SteppedEngine(prefill_chunk_tokens=2)
    engine.add("long", text="x" * 40)
    engine.add("short", text="x" * 20)
    engine.step_until(lambda: len(engine.chunks) == 4)
    candidates = [engine.scheduler._planner._device_order.next_to_prefill() for _ in range(5)]
    assert {request.request_id for request in candidates if request} == {"long"}
    engine.run()
    assert [name for name, _, _ in engine.chunks[:9]] == ["long", "short"] * 4 + ["long"]


def test_oldest_request_finishes_first_without_room_for_two():
    assert queue(a=4, b=1, c=1).run(room=1) == "aaaabc"


def test_request_does_not_begin_without_room():
    job_queue = queue(a=2)
    assert job_queue.turn(room=0) is None
    assert job_queue.run(room=1) == "aa"


def test_request_waiting_for_many_rows_is_not_overtaken():
    job_queue = queue()
    job_queue.add("wide", 3, num_seqs=4)
    job_queue.add("b", 1)
    assert [job_queue.turn(room) for room in (0, 1, 3)] == [None] * 3
    assert [job_queue.turn(room=4) for _ in range(4)] == ["wide"] * 3 + ["b"]


@pytest.mark.parametrize(("room", "order"), [(4, "aaaaaabbc"), (5, "acaaaaabb"), (6, "acababaaa")])
def test_short_request_interleaves_if_its_rows_also_fit(room: int, order: str):
    job_queue = queue()
    job_queue.add("a", 6, num_seqs=4)
    job_queue.add("b", 2, num_seqs=2)
    job_queue.add("c", 1)
    assert job_queue.run(room) == order


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), min_size=1, max_size=20),
    st.integers(1, 9),
    st.integers(1, 2),
)
def test_wait_is_at_most_twice_work_ahead(jobs: list[tuple[int, int]], newcomer: int, room: int):
    """`jobs` come at these turns; one more comes at every turn."""
    job_queue = Queue()
    arrivals = sorted((when, n, left) for n, (when, left) in enumerate(jobs))
    bounds: dict[str, int] = {}
    for turn in range(500):
        while arrivals and arrivals[0][0] <= turn:
            _, number, left = arrivals.pop(0)
            before = sum(job.left for job in job_queue.jobs)
            job_queue.add(f"job {number}", left)
            bounds[f"job {number}"] = turn + 2 * (before + left)
        if not arrivals and not bounds:
            return
        job_queue.add(f"newcomer {turn}", newcomer)
        job_queue.turn(room)
        for name in [name for name in bounds if name in job_queue.done]:
            assert turn <= bounds.pop(name)
        assert all(turn <= bound for bound in bounds.values())
    raise AssertionError("somebody waits for ever")
