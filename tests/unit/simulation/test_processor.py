"""Simulated work shares cores: none is lost, and none is faster than one core."""

from __future__ import annotations

import random

import pytest
import simpy

from scripts.simulation.processor import Processor, share_machine

pytestmark = pytest.mark.unit


def ends(processor: Processor, env: simpy.Environment, *works: tuple[float, float]) -> list[float]:
    """The end of each of the works (begin, seconds)."""
    found = [0.0] * len(works)

    def run(number: int, begin: float, seconds: float):
        yield env.timeout(begin)
        yield processor.start(seconds).done
        found[number] = env.now

    for number, (begin, seconds) in enumerate(works):
        env.process(run(number, begin, seconds))
    env.run()
    return found


@pytest.mark.parametrize(
    ("cores", "works", "expected"),
    [
        (1, [(0, 3)], [3]),
        (1, [(0, 3), (0, 3)], [6, 6]),
        (1, [(0, 4), (2, 1)], [5, 4]),
        (2, [(0, 3), (0, 3)], [3, 3]),
        (2, [(0, 2), (0, 2), (0, 2)], [3, 3, 3]),
        (1, [(0, 0), (1, 1)], [0, 2]),
    ],
)
def test_simulated_work_shares_cores(
    cores: int, works: list[tuple[float, float]], expected: list[float]
):
    env = simpy.Environment()
    assert ends(Processor(env, cores), env, *works) == pytest.approx(expected)


def test_processor_busy_time_equals_sum_of_work():
    drawn = random.Random(1)
    works = [(drawn.uniform(0, 50), drawn.expovariate(3)) for _ in range(100)]
    env = simpy.Environment()
    processor = Processor(env, 2)
    ends(processor, env, *works)
    assert processor.busy_seconds == pytest.approx(sum(seconds for _, seconds in works))


def test_processor_sharing_mean_time_matches_theory():
    """M/M/1 with processor sharing: S / (1 - load), for the sampled load."""
    drawn, env, now, works = random.Random(2), simpy.Environment(), 0.0, []
    for _ in range(20_000):
        now += drawn.expovariate(0.6)
        works.append((now, drawn.expovariate(1)))
    found = ends(Processor(env), env, *works)
    mean = sum(end - begin for end, (begin, _) in zip(found, works, strict=True)) / len(works)
    drawn_seconds = sum(seconds for _, seconds in works)
    expected = drawn_seconds / len(works) / (1 - drawn_seconds / now)
    assert mean == pytest.approx(expected, rel=0.07)


def test_shortened_work_ends_early():
    env = simpy.Environment()
    processor = Processor(env)
    work, other = processor.start(10), processor.start(10)
    env.run(until=2)
    assert processor.seconds_left(work) == pytest.approx(9)
    processor.shorten(work, 1)
    env.run(until=work.done)
    assert env.now == pytest.approx(4)
    env.run(until=other.done)
    assert env.now == pytest.approx(12)


def test_shared_machine_slows_processors_while_both_work():
    env = simpy.Environment()
    processors = [Processor(env), Processor(env)]
    share_machine(processors, 1.5)
    first, second = processors[0].start(3), processors[1].start(1)
    env.run(until=second.done)
    assert env.now == pytest.approx(1.5)
    env.run(until=first.done)
    assert env.now == pytest.approx(1.5 + 2)
