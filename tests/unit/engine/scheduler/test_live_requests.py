"""Clients take turns: many requests of one client never delay another by more than a few."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.driver import SteppedEngine
from tests.unit.engine.fakes import submit
from vlm_server.engine.request.states import State


def add(
    engine: SteppedEngine, client: str, *names: str, images: int = 0, **sampling: object
) -> None:
    for name in names:
        request_names = submit(name, images=images, **sampling)
        engine.inbox.put(msgspec.structs.replace(request_names, client=client))


def begin_order(engine: SteppedEngine) -> list[str]:
    """The requests in the order in which the runner met them."""
    return [new.request_id for plan in engine.plans for new in plan.new]


def names(client: str, count: int) -> list[str]:
    return [f"{client}{number}" for number in range(count)]


def test_requests_of_one_client_begin_in_order() -> None:
    engine = SteppedEngine(max_num_seqs=1)
    add(engine, "a", *names("a", 6))
    engine.run()
    assert begin_order(engine) == names("a", 6)


@pytest.mark.parametrize("images", [0, 1])
def test_late_client_is_next_and_then_alternates(images: int) -> None:
    engine = SteppedEngine(max_num_seqs=1, max_preparing=2, clock=lambda: 0.0)
    add(engine, "a", *names("a", 12), images=images)
    engine.step_until(lambda: "a1" in engine.ended)
    add(engine, "b", *names("b", 3), images=images)
    engine.run()
    order = begin_order(engine)
    assert [name for name in order if name[0] == "a"] == names("a", 12)
    assert [name for name in order if name[0] == "b"] == names("b", 3)
    last = order.index("b2")
    assert last <= order.index("a2") + 6 + 2 * images, "some are already prepared"


def test_free_place_goes_to_waiting_client() -> None:
    engine = SteppedEngine(max_num_seqs=3)
    add(engine, "a", *names("a", 9), max_tokens=20, ignore_eos=True)
    engine.step_until(lambda: len(engine.runner.seqs) == 3)
    add(engine, "b", "b0")
    engine.run()
    assert begin_order(engine)[:5] == ["a0", "a1", "a2", "a3", "b0"]


def test_request_of_many_choices_uses_many_turns() -> None:
    engine = SteppedEngine(max_num_seqs=3)
    add(engine, "x", "first", n=3, max_tokens=9, ignore_eos=True)
    engine.step_until(lambda: len(engine.runner.seqs) == 3)
    add(engine, "a", "a0", "a1", n=3)
    add(engine, "b", *names("b", 5))
    engine.run()
    order = begin_order(engine)
    assert order.index("b2") < order.index("a1") < order.index("b4")


def test_sole_client_builds_up_no_debt() -> None:
    """Service without competition does not count against a client."""
    engine = SteppedEngine(max_num_seqs=1)
    add(engine, "c", "long", max_tokens=150, ignore_eos=True)
    engine.step_until(lambda: engine.count(State.DECODE) == 1)
    engine.abort("long")
    add(engine, "a", *names("a", 20))
    engine.run()
    add(engine, "b", *names("b", 4))
    add(engine, "a", "again")
    engine.run()
    assert begin_order(engine).index("again") <= begin_order(engine).index("b1")


def test_idle_client_gains_no_credit() -> None:
    engine = SteppedEngine(max_num_seqs=1)
    add(engine, "b", "b0")
    engine.run()
    add(engine, "a", *names("a", 10))
    engine.run()
    add(engine, "a", *(f"later{number}" for number in range(6)))
    add(engine, "b", *(f"b{number}" for number in range(1, 7)))
    engine.run()
    order = [name[0] for name in begin_order(engine)[-12:]]
    assert "bbb" not in "".join(order)


@given(st.lists(st.sampled_from("aaaaabbc"), min_size=2, max_size=40), st.integers(1, 3))
def test_waiting_clients_are_served_equally_often(clients: str, max_num_seqs: int) -> None:
    """All requests arrive together; each client that still waits is served about as often."""
    engine = SteppedEngine(max_num_seqs=max_num_seqs, max_preparing=50)
    request_names = [f"{client}{number}" for number, client in enumerate(clients)]
    for name in request_names:
        add(engine, name[0], name)
    engine.run()
    order = begin_order(engine)
    assert sorted(order) == sorted(request_names)
    for client in set(clients):
        mine = [name for name in request_names if name[0] == client]
        assert [name for name in order if name[0] == client] == mine
        for other in set(clients) - {client}:
            until = order.index(mine[-1])
            others = sum(name[0] == other for name in order[:until])
            assert others <= len(mine) + 2


def test_ended_clients_leave_no_state() -> None:
    engine = SteppedEngine()
    for number in range(50):
        add(engine, f"client {number}", f"r{number}")
        engine.run()
    assert len(engine.scheduler._requests._next_starts) <= 1
