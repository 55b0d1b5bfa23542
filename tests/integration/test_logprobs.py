"""Log probabilities of drawn tokens, from logits of every kind."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from vlm_server.interfaces import SeqId, TokenLogprobs
from vlm_server.runner.sampling import compute_logprobs


def greedy_logprobs(logits: mx.array, *num_top: int) -> list[TokenLogprobs]:
    """The scores of each row's greedy token; `num_top` alternatives for each row."""
    asking = [(row, SeqId(str(row)), count) for row, count in enumerate(num_top)]
    (scores,) = compute_logprobs(logits, mx.argmax(logits, axis=-1), asking)
    return [token_score for _, token_score in scores.read()]


def random_logits(rows: int, vocabulary_size: int) -> mx.array:
    drawn = np.random.default_rng(0).normal(scale=3, size=(rows, vocabulary_size))
    return mx.array(drawn.astype(np.float32))


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_top_logprobs_are_ordered_by_probability(num_top: int):
    logits = random_logits(3, 1000)
    logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    for row, found in zip(logprobs, greedy_logprobs(logits, *[num_top] * 3), strict=True):
        expected = np.argsort(-row)[:num_top]
        assert [token_id for token_id, _ in found.top] == expected.tolist()
        assert [value for _, value in found.top] == pytest.approx(row[expected].tolist())
        assert found.logprob == pytest.approx(row.max())


def test_rows_get_their_requested_number_of_logprobs():
    counts = [0, 3, 20, 1]
    assert [len(found.top) for found in greedy_logprobs(random_logits(4, 50), *counts)] == counts


def test_top_logprobs_are_limited_to_vocabulary():
    (found,) = greedy_logprobs(random_logits(1, 7), 20)
    assert sorted(token_id for token_id, _ in found.top) == list(range(7))


@pytest.mark.parametrize("num_top", [1, 2, 5])
def test_greedy_token_is_listed_first_among_equal_logprobs(num_top: int):
    logits = mx.zeros((1, 300), dtype=mx.bfloat16)
    logits[0, 100:200] = 4.0
    (found,) = greedy_logprobs(logits, num_top)
    assert found.top[0] == (100, found.logprob)
    assert {value for _, value in found.top} == {found.logprob}


@pytest.mark.parametrize("worst", [-float("inf"), float("nan")])
def test_infinite_and_nan_logits_still_give_top_logprobs(worst: float):
    logits = mx.full((1, 10), worst)
    logits[0, 3] = 1.0
    (found,) = greedy_logprobs(logits, 4)
    assert len({token_id for token_id, _ in found.top}) == 4
