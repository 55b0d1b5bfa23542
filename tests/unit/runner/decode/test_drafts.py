"""The drafter guesses next tokens from a sequence's own past."""

from __future__ import annotations

import random

import numpy as np

from vlm_server.runner.decode.drafts import Drafter


def new_drafter(*prompt: int, prediction: tuple[int, ...] = ()) -> Drafter:
    return Drafter(np.array(prompt, dtype=np.int32), prediction)


def test_drafter_guesses_tokens_after_equal_sequence():
    drafter = new_drafter(1, 2, 3, 4, 5, 9, 1, 2)
    assert drafter.guess(3) == [3, 4, 5]
    drafter.append(3)
    assert drafter.guess(2) == [4, 5]


def test_drafter_needs_match_of_two_tokens():
    assert new_drafter(1, 2, 3, 2).guess(3) == []
    assert new_drafter(1, 2, 3, 2).probability == 0.0
    assert new_drafter().guess(3) == new_drafter(1).guess(3) == []


def test_drafter_uses_longest_and_newest_match():
    assert new_drafter(7, 1, 2, 5, 8, 1, 2, 6, 7, 1, 2).guess(1) == [5]
    assert new_drafter(1, 2, 5, 1, 2, 6, 1, 2).guess(1) == [6]


def test_drafter_continues_periodic_text():
    drafter = new_drafter(4, 5, 6, 4, 5, 6, 4, 5)
    assert drafter.guess(7) == [6, 4, 5, 6, 4, 5, 6]
    assert new_drafter(8, 8, 8).guess(4) == [8] * 4


def test_drafter_looks_for_another_match_after_miss():
    drafter = new_drafter(1, 2, 3, 9, 3, 7, 1, 2)
    drafter.append(9)
    assert drafter.guess(1) == []
    drafter.append(3)
    assert drafter.guess(1) == [7]


def test_drafter_prefers_predicted_output():
    drafter = new_drafter(1, 2, 3, prediction=(11, 12, 13, 14))
    assert drafter.guess(3) == [11, 12, 13]
    for token in (11, 99, 12, 13):
        drafter.append(token)
    assert drafter.guess(1) == [14]


def test_drafter_learns_its_hit_probability():
    draw = random.Random(3)
    prose = new_drafter(*(draw.randrange(20) for _ in range(400)))
    for _ in range(400):
        prose.append(draw.randrange(20))
    while not prose.probability:
        prose.append(draw.randrange(20))
    assert prose.probability < 0.2
    steady = new_drafter(*range(10))
    for token in [*range(10)] * 8:
        steady.append(token)
    assert steady.probability > 0.9
    assert all(chance > 0.9 for chance in steady.probabilities(15))


def test_drafter_finds_matches_thousands_of_tokens_back():
    drafter = new_drafter(1, 2, 3)
    for i in range(5000):
        drafter.append(10 + i)
    drafter.append(2)
    drafter.append(3)
    assert drafter.guess(2) == [10, 11]
