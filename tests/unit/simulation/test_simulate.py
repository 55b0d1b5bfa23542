"""Simulated daemons obey queueing theory, cache hits and routing, whatever work costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from scripts.simulation.gateway import Policy
from scripts.simulation.simulate import Fleet, Result, simulate
from scripts.simulation.summary import summarize
from scripts.simulation.worker import Limits
from tests.unit.simulation import agents

pytestmark = pytest.mark.unit


def hit_rate(result: Result) -> float:
    return summarize(result.asked, 0, float("inf")).hit_rate


def test_simulation_is_reproducible_by_seed():
    costs, work, fleet = agents.costs(), agents.workload(users=9), Fleet(workers=2)
    first, second = simulate(costs, work, fleet), simulate(costs, work, fleet)
    assert first == second
    assert simulate(costs, replace(work, seed=1), fleet).asked != first.asked


def test_lone_turn_takes_sum_of_its_costs():
    """Decoding runs one step ahead of its report, so it takes as many steps as tokens."""
    costs = agents.costs()
    result = simulate(costs, agents.workload(users=1, answer_tokens=5), Fleet())
    first, second = (request for request in result.asked[:2])
    tokens = 50 + 80
    prompt = costs.request_seconds(tokens, 1) + costs.picture_seconds(80)
    expected = prompt + costs.encode_seconds(80) + costs.prefill_seconds(tokens, 0)
    assert first.ttft == pytest.approx(expected)
    assert first.cached_tokens == 0
    answer = costs.join_seconds(tokens) + 5 * costs.decode_seconds(1, tokens)
    assert first.ended - first.sent - first.ttft == pytest.approx(answer, rel=1e-3)
    tokens += 30 + 80 + 5
    assert second.prompt_tokens == tokens
    assert second.cached_tokens == 50 + 80 + 5


def test_simulated_waiting_matches_md1_queue():
    """M/D/1: load * S / (2 (1 - load)), for many users with rare one-turn questions."""
    costs = agents.free(prefill=(0.1, 0.0, 0.0, 0.0), head_tokens=0)
    users, load = 300, 0.6
    work = agents.workload(
        users=users,
        turns=1,
        pictures=0,
        answer_tokens=1,
        think_seconds=users * 0.1 / load,
        seconds=1200.0,
    )
    result = simulate(costs, work, Fleet())
    wait = sum(request.ttft for request in result.asked) / len(result.asked) - 0.1
    assert result.utilisation[0] == pytest.approx(load, rel=0.05)
    assert wait == pytest.approx(load * 0.1 / (2 * (1 - load)), rel=0.15)


def test_simulated_throughput_is_bounded_by_work_and_users():
    costs = agents.free(prefill=(0.1, 0.0, 0.0, 0.0))
    for users in (1, 4, 40):
        work = agents.workload(users=users, pictures=0, answer_tokens=1, seconds=400.0)
        result = simulate(costs, work, Fleet())
        rate = len(result.asked) / result.seconds
        assert rate < 1.1 * min(users / 2.1, 10)
        assert users < 40 or rate > 9.8
        assert result.utilisation[0] <= 1 + 1e-9
        assert result.utilisation[0] == pytest.approx(rate * 0.1)


def test_simulation_obeys_littles_law():
    """Little's law; a user is in the daemon while not thinking."""
    costs, users = agents.costs(), 12
    work = agents.workload(users=users, seconds=300.0)
    asked = simulate(costs, work, Fleet()).asked
    rate = len(asked) / 300
    mean_seconds = sum(request.ended - request.sent for request in asked) / len(asked)
    assert rate * (mean_seconds + work.think_seconds) == pytest.approx(users, rel=0.05)


def test_fresh_conversations_have_no_cache_hits():
    costs = agents.costs(head_tokens=0)
    assert hit_rate(simulate(costs, agents.workload(turns=1), Fleet())) == 0


def test_simulated_turn_hits_whole_previous_conversation():
    result = simulate(agents.costs(), agents.workload(), Fleet())
    before: dict[str, int] = {}
    for request in sorted(result.asked, key=lambda request: request.sent):
        if request.turn:
            assert request.cached_tokens == before[request.key]
        before[request.key] = request.prompt_tokens + request.answer_tokens


def test_key_routing_alone_keeps_cache_hits():
    costs, work = agents.costs(), agents.workload(users=16, seconds=60.0)
    rates = {p: hit_rate(simulate(costs, work, Fleet(workers=8, policy=p))) for p in Policy}
    alone = hit_rate(simulate(costs, agents.workload(users=2, seconds=60.0), Fleet()))
    assert rates[Policy.KEY] == pytest.approx(alone, abs=0.03)
    assert max(rates[Policy.RANDOM], rates[Policy.ROUND_ROBIN]) < 0.5 * rates[Policy.KEY]
    for policy in Policy:
        assert hit_rate(simulate(costs, work, Fleet(policy=policy))) == pytest.approx(
            rates[Policy.KEY], abs=0.03
        )


def test_smaller_simulated_cache_lowers_hit_rate():
    costs, work = agents.costs(), agents.workload(users=8)
    sizes = [tokens * costs.kv_bytes_per_token for tokens in (0, 1000, 2500, 1e6)]
    rates = [
        hit_rate(simulate(costs, work, Fleet(limits=Limits(prefix_bytes=size)))) for size in sizes
    ]
    assert rates[0] == 0
    assert rates == sorted(rates)
    assert rates[1] < 0.8 * rates[-1]


def test_little_simulated_memory_delays_requests():
    costs, work = agents.costs(), agents.workload(users=12)
    request_bytes = 900 * costs.kv_bytes_per_token
    few, many = (
        summarize(simulate(costs, work, Fleet(limits=Limits(running_bytes=n))).asked, 0, 60)
        for n in (request_bytes, 100 * request_bytes)
    )
    assert few.ttft_p50 > 1.2 * many.ttft_p50
    assert few.requests < many.requests


def test_lost_worker_moves_only_its_conversations():
    costs, work = agents.costs(), agents.workload(users=12, turns=20, seconds=80.0)
    whole = simulate(costs, work, Fleet(workers=4))
    less = simulate(costs, work, Fleet(workers=4, lost_at=40.0))
    assert hit_rate(less) < hit_rate(whole)
    before, after = ({}, {})
    for request in less.asked:
        (before if request.ended < 40 else after).setdefault(request.key, set()).add(request.worker)
    stayed = [key for key in before.keys() & after.keys() if before[key] == after[key]]
    moved = [key for key in before.keys() & after.keys() if before[key] != after[key]]
    lost = {worker for key in moved for worker in before[key]}
    assert stayed
    assert moved
    assert len(lost) == 1
    assert not lost & {worker for workers in after.values() for worker in workers}


def test_simulated_turns_are_answered_once_and_in_order():
    work = agents.workload(users=12, seconds=60.0)
    asked = simulate(agents.costs(), work, Fleet(workers=3, lost_at=30.0)).asked
    assert max(Counter((request.key, request.turn) for request in asked).values()) == 1
    for key, turn in {(request.key, request.turn) for request in asked}:
        assert turn == 0 or any(
            request.key == key and request.turn == turn - 1 for request in asked
        )


def test_simulation_fails_when_all_workers_are_lost():
    with pytest.raises(RuntimeError, match="all workers are lost"):
        simulate(agents.costs(), agents.workload(), Fleet(lost_at=20.0))
