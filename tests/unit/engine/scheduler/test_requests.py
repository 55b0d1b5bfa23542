"""Clients take turns: who sends much waits behind who sends little, and nobody for ever."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.driver import Engine
from tests.unit.engine.fakes import submit
from vlm_server.engine.request.states import State


def add(engine: Engine, client: str, *names: str, images: int = 0, **sampling: object) -> None:
    for name in names:
        asked = submit(name, images=images, **sampling)
        engine.inbox.put(msgspec.structs.replace(asked, client=client))


def begun(engine: Engine) -> list[str]:
    """The requests in the order in which the runner met them."""
    return [new.request_id for plan in engine.plans for new in plan.new]


def names(client: str, count: int) -> list[str]:
    return [f"{client}{number}" for number in range(count)]


def test_requests_of_a_client_begin_in_order() -> None:
    engine = Engine(max_num_seqs=1)
    add(engine, "a", *names("a", 6))
    engine.run()
    assert begun(engine) == names("a", 6)


@pytest.mark.parametrize("images", [0, 1])
def test_late_client_is_next_and_then_alternates(images: int) -> None:
    engine = Engine(max_num_seqs=1, max_preparing=2, clock=lambda: 0.0)
    add(engine, "a", *names("a", 12), images=images)
    engine.step_until(lambda: "a1" in engine.ended)
    add(engine, "b", *names("b", 3), images=images)
    engine.run()
    course = begun(engine)
    assert [name for name in course if name[0] == "a"] == names("a", 12)
    assert [name for name in course if name[0] == "b"] == names("b", 3)
    last = course.index("b2")
    assert last <= course.index("a2") + 6 + 2 * images, "some are already prepared"


def test_free_place_goes_to_the_waiting_client() -> None:
    engine = Engine(max_num_seqs=3)
    add(engine, "a", *names("a", 9), max_tokens=20, ignore_eos=True)
    engine.step_until(lambda: len(engine.runner.seqs) == 3)
    add(engine, "b", "b0")
    engine.run()
    assert begun(engine)[:5] == ["a0", "a1", "a2", "a3", "b0"]


def test_request_of_many_choices_uses_many_turns() -> None:
    engine = Engine(max_num_seqs=3)
    add(engine, "x", "first", n=3, max_tokens=9, ignore_eos=True)
    engine.step_until(lambda: len(engine.runner.seqs) == 3)
    add(engine, "a", "a0", "a1", n=3)
    add(engine, "b", *names("b", 5))
    engine.run()
    course = begun(engine)
    assert course.index("b2") < course.index("a1") < course.index("b4")


def test_client_served_alone_has_no_debt() -> None:
    """What it had while nobody else wanted anything does not count against it."""
    engine = Engine(max_num_seqs=1)
    add(engine, "c", "long", max_tokens=150, ignore_eos=True)
    engine.step_until(lambda: engine.count(State.DECODE) == 1)
    engine.abort("long")
    add(engine, "a", *names("a", 20))
    engine.run()
    add(engine, "b", *names("b", 4))
    add(engine, "a", "again")
    engine.run()
    assert begun(engine).index("again") <= begun(engine).index("b1")


def test_idle_client_gains_no_credit() -> None:
    engine = Engine(max_num_seqs=1)
    add(engine, "b", "b0")
    engine.run()
    add(engine, "a", *names("a", 10))
    engine.run()
    add(engine, "a", *(f"later{number}" for number in range(6)))
    add(engine, "b", *(f"b{number}" for number in range(1, 7)))
    engine.run()
    course = [name[0] for name in begun(engine)[-12:]]
    assert "bbb" not in "".join(course)


@given(st.lists(st.sampled_from("aaaaabbc"), min_size=2, max_size=40), st.integers(1, 3))
def test_waiting_clients_are_served_equally_often(clients: str, max_num_seqs: int) -> None:
    """All are there at once; each that still waits is begun about as often as the others."""
    engine = Engine(max_num_seqs=max_num_seqs, max_preparing=50)
    asked = [f"{client}{number}" for number, client in enumerate(clients)]
    for name in asked:
        add(engine, name[0], name)
    engine.run()
    course = begun(engine)
    assert sorted(course) == sorted(asked)
    for client in set(clients):
        mine = [name for name in asked if name[0] == client]
        assert [name for name in course if name[0] == client] == mine
        for other in set(clients) - {client}:
            until = course.index(mine[-1])
            others = sum(name[0] == other for name in course[:until])
            assert others <= len(mine) + 2


def test_ended_clients_leave_no_state() -> None:
    engine = Engine()
    for number in range(50):
        add(engine, f"client {number}", f"r{number}")
        engine.run()
    assert len(engine.scheduler._requests._next_starts) <= 1
