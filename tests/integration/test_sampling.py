"""Sampling: greedy, nucleus, penalties, and seeds that do not depend on the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from tests.integration.harness import GREEDY, EngineHarness, ask, prompt_of
from tests.support.active_memory import active_bytes
from tests.support.images import random_image
from tests.support.whole_run import few_of
from vlm_server.interfaces import SeqId, TokenLogprobs
from vlm_server.prompt.preparer import MultimodalPreparer
from vlm_server.protocol import Failed, SamplingParams
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.sampling import (
    NO_TOKEN,
    SequenceSampler,
    compute_logprobs,
    sample,
    sample_and_advance,
)

PROBABILITIES = np.array([0.15, 0.05, 0.3, 0.4, 0.1])
LIKELIEST = 3
LOGITS = mx.array(np.log(PROBABILITIES).astype(np.float32))
DRAWS = 1500


def row_of(
    vocabulary_size: int = 50,
    prompt_ids: tuple[int, ...] = (0, 1),
    eos_token_ids: frozenset[int] = frozenset({2}),
    **params: object,
) -> SequenceSampler:
    """A row whose prompt was tokens 0 and 1, and whose end is token 2."""
    prompt = np.array(prompt_ids, dtype=np.int32)
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return SequenceSampler(sampling, prompt, eos_token_ids, vocabulary_size)


def sample_row(row: SequenceSampler, logits: mx.array = LOGITS, count: int = DRAWS) -> list[int]:
    """Token ids that `row` draws in a run, from the same logits each time."""
    tokens = [sample_and_advance(logits[None], [row]) for _ in range(count)]
    return [int(i) for i in np.array(mx.concatenate(tokens))]


def sample_tokens(temperature: float, top_p: float, seed: int = 0, count: int = DRAWS) -> list[int]:
    row = row_of(len(PROBABILITIES), temperature=temperature, top_p=top_p, seed=seed)
    return sample_row(row, count=count)


def token_shares(tokens: list[int]) -> np.ndarray:
    counts = Counter(tokens)
    return np.array([counts[i] / len(tokens) for i in range(len(PROBABILITIES))])


@pytest.mark.parametrize("temperature", few_of([0.5, 1.0, 2.0], [0.5]))
def test_token_frequencies_follow_temperature(temperature: float):
    expected = PROBABILITIES ** (1 / temperature)
    expected /= expected.sum()
    assert token_shares(sample_tokens(temperature, 1.0)) == pytest.approx(expected, abs=0.04)


NUCLEI = [(0.0, 1), (0.39, 1), (0.41, 2), (0.71, 3), (0.9, 4), (0.96, 5), (1e-9, 1)]


@pytest.mark.parametrize(("top_p", "kept"), few_of(NUCLEI, NUCLEI[1:4]))
def test_top_p_keeps_nucleus_in_proportion(top_p: float, kept: int):
    least = np.sort(PROBABILITIES)[-kept]
    expected = np.where(least <= PROBABILITIES, PROBABILITIES, 0)
    found = token_shares(sample_tokens(1.0, top_p))
    assert found == pytest.approx(expected / expected.sum(), abs=0.04)
    assert not found[expected == 0].any()


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-38, 1e-45, 1e-60])
def test_tiny_temperature_is_greedy(temperature: float):
    assert set(sample_tokens(temperature, 1.0, count=50)) == {LIKELIEST}
    assert set(sample_tokens(temperature, 0.5, count=50)) == {LIKELIEST}


def test_tiny_temperature_is_greedy_with_large_logits_of_either_sign():
    for logits in ([79.0, 80.0, 5.0], [-6.0, -5.0, -80.0]):
        row = row_of(3, temperature=1e-37, seed=0)
        assert set(sample_row(row, mx.array(logits), 20)) == {1}


def test_temperature_0_takes_largest_logit():
    rows = [row_of(temperature=0.0, seed=seed) for seed in range(8)]
    logits = mx.array(np.random.default_rng(0).normal(size=(8, 50)).astype(np.float32))
    assert sample(logits, rows).tolist() == mx.argmax(logits, axis=-1).tolist()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_greedy_and_sampled_rows_share_batch(dtype: mx.Dtype):
    logits = mx.array(np.random.default_rng(0).normal(size=(4, 50)), dtype=dtype)
    params = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.9, "seed": 2},
        {"temperature": 0.0, "logit_bias": {7: 100.0}},
        {"temperature": 0.7, "seed": 4, "min_p": 0.1, "top_k": 5},
    ]
    together = sample(logits, [row_of(**each) for each in params]).tolist()
    apart = [sample(logits[i : i + 1], [row_of(**each)]).item() for i, each in enumerate(params)]
    assert together == apart
    assert together[2] == 7


@pytest.mark.parametrize("top_k", few_of([1, 2, 4], [2]))
def test_top_k_keeps_likeliest(top_k: int):
    found = token_shares(sample_row(row_of(5, temperature=1.0, seed=1, top_k=top_k)))
    least = np.sort(PROBABILITIES)[-top_k]
    expected = np.where(least <= PROBABILITIES, PROBABILITIES, 0)
    assert found == pytest.approx(expected / expected.sum(), abs=0.04)


def test_min_p_is_relative_to_likeliest():
    found = token_shares(sample_row(row_of(5, temperature=1.0, seed=1, min_p=0.3)))
    assert (found > 0).tolist() == (0.3 * PROBABILITIES.max() <= PROBABILITIES).tolist()


def test_logit_bias_forces_and_bans_tokens():
    assert set(sample_row(row_of(5, temperature=0.0, logit_bias={1: 100.0}), count=5)) == {1}
    banned = sample_row(row_of(5, temperature=1.0, seed=1, logit_bias={LIKELIEST: -100.0}))
    assert LIKELIEST not in banned


def test_frequency_and_presence_penalties_count_answer():
    """Greedy from fixed logits: each draw lowers its own token by the penalty."""
    logits = mx.array([0.0, 1.0, -9.0, 1.5, 0.9])
    assert sample_row(row_of(5, temperature=0.0, presence_penalty=1.0), logits, 5) == [
        3,
        1,
        4,
        3,
        3,
    ]
    assert sample_row(row_of(5, temperature=0.0, frequency_penalty=1.0), logits, 5) == [
        3,
        1,
        4,
        3,
        0,
    ]


def test_repetition_penalty_counts_prompt_too():
    logits = mx.array([2.0, 1.9, -9.0, 1.5, -1.0])
    row = row_of(5, temperature=0.0, repetition_penalty=2.0)
    assert sample_row(row, logits, 2) == [3, 0]
    lower = mx.array([-1.0, -1.1, -9.0, -1.5, -4.0])
    assert sample_row(row_of(5, temperature=0.0, repetition_penalty=2.0), lower, 1) == [3]


def test_min_tokens_delays_eos():
    logits = mx.array([0.0, 1.0, 9.0, 0.5, 0.5])
    assert sample_row(row_of(5, temperature=0.0, min_tokens=2), logits, 4) == [1, 1, 2, 2]


@pytest.mark.parametrize("strangers", [(), (-1,), (5,), (2**31 - 1, 2**40)])
def test_min_tokens_ignores_eos_tokens_without_logits(strangers: tuple[int, ...]):
    logits = mx.array([0.0, 1.0, 9.0, 0.5, 0.5])
    row = row_of(5, eos_token_ids=frozenset(strangers), temperature=0.0, min_tokens=9)
    assert sample_row(row, logits, 2) == [2, 2]
    row = row_of(5, eos_token_ids=frozenset({2, *strangers}), temperature=0.0, min_tokens=9)
    assert sample_row(row, logits, 2) == [1, 1]


def test_prompt_tokens_without_logits_are_not_penalized():
    """The placeholders of some families' images stand beyond the logits."""
    logits = mx.array([2.0, 1.9, -9.0, 1.5, -1.0])
    row = row_of(5, prompt_ids=(0, 5, 2**31 - 1), temperature=0.0, repetition_penalty=2.0)
    assert sample_row(row, logits, 2) == [1, 3]


@pytest.mark.parametrize("penalty", [1e-5, 1e-30, 5e-324])
@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0])
def test_tiny_repetition_penalty_does_not_overflow(penalty: float, temperature: float):
    logits = mx.array([50.0, 49.0, -9.0, 60.0, -90.0])
    row = row_of(5, temperature=temperature, repetition_penalty=penalty, seed=1)
    assert set(sample_row(row, logits, 5)) == {0}


def test_seeds_and_steps_give_different_samples():
    runs = {tuple(sample_tokens(2.0, 1.0, seed, 30)) for seed in (0, 1, 2, 2**31, 2**32, 2**63 - 1)}
    assert len(runs) == 6


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63, 2**64 - 1, 2**70])
def test_any_integer_is_accepted_as_seed(seed: int):
    assert sample_tokens(1.0, 1.0, seed, 5) == sample_tokens(1.0, 1.0, seed, 5)


def test_unseeded_runs_differ():
    assert len({tuple(sample_row(row_of(5, temperature=2.0), count=30)) for _ in range(4)}) == 4


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("broken", [mx.nan, mx.inf, -mx.inf])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.0, "logit_bias": {7: 2.0}},
        {"temperature": 1.0, "presence_penalty": 1.0},
    ],
)
def test_row_of_nan_logits_draws_no_token(dtype: mx.Dtype, broken: float, params: dict[str, float]):
    logits = mx.array(np.random.default_rng(0).normal(size=(3, 50)), dtype=dtype)
    expected = sample(logits, [row_of(seed=seed, **params) for seed in range(3)]).tolist()
    logits[1] = broken
    tokens = sample(logits, [row_of(seed=seed, **params) for seed in range(3)]).tolist()
    assert tokens == [expected[0], NO_TOKEN, expected[2]]


def test_row_with_failing_logit_adjustment_draws_no_token():
    class Broken(SequenceSampler):
        def adjust(self, scores: mx.array) -> mx.array:
            raise RuntimeError("a bug of this row")

    greedy = SamplingParams(temperature=0.0, logit_bias={7: 100.0})
    broken = Broken(greedy, np.array([0], dtype=np.int32), frozenset(), 50)
    rows = [row_of(temperature=0.0, logit_bias={7: 100.0}), broken, row_of(temperature=0.0)]
    logits = mx.array(np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32))
    assert sample(logits, rows).tolist() == [7, NO_TOKEN, mx.argmax(logits[2]).item()]


# ---- in the engine -------------------------------------------------------------------


def sampled_params(seed: int | None, **changes: float) -> SamplingParams:
    values = {"temperature": 1.5, "top_p": 0.95} | changes
    return SamplingParams(max_tokens=20, seed=seed, **values)


def test_seeded_tokens_do_not_depend_on_batch(new_qwen_engine: Callable[[], EngineHarness]):
    alone = new_qwen_engine().answer(ask("a", random_image(1), "what?", sampling=sampled_params(7)))
    beside = new_qwen_engine()
    beside.add(ask("greedy", "a text", sampling=GREEDY))
    beside.step(3)
    beside.add(ask("other", random_image(2), "and?", sampling=sampled_params(None)))
    beside.add(ask("a", random_image(1), "what?", sampling=sampled_params(7)))
    beside.add(ask("twin", random_image(1), "what?", sampling=sampled_params(7)))
    beside.add(ask("sibling", random_image(1), "what?", sampling=sampled_params(8)))
    beside.run()
    assert beside.tokens["a"] == alone
    assert beside.tokens["twin"] == alone
    assert beside.tokens["sibling"] != alone


def test_greedy_answer_is_unchanged_in_batch_with_sampled_rows(
    new_qwen_engine: Callable[[], EngineHarness],
):
    alone = new_qwen_engine().answer(ask("a", "a text"))
    beside = new_qwen_engine()
    beside.add(ask("drawn", "a text", sampling=sampled_params(1)))
    beside.add(ask("a", "a text"))
    beside.run()
    assert beside.tokens["a"] == alone
    assert beside.tokens["drawn"] != alone


def test_sampling_keeps_no_logits_in_memory(new_qwen_engine: Callable[[], EngineHarness]):
    engine = new_qwen_engine()
    asking = SamplingParams(max_tokens=5, temperature=0.0, logprobs=3)

    def held_after(name: str, sampling: SamplingParams) -> int:
        engine.answer(ask(name, "Hello", sampling=sampling))
        return active_bytes()

    held_after("first", asking)
    assert held_after("scored", asking) <= held_after("plain", GREEDY)


@pytest.mark.parametrize("where", ["prompt", "answer"])
def test_nan_embedding_fails_only_requests_with_that_token(
    load_tiny: Callable[[str], tuple[LoadedModel, MultimodalPreparer]], where: str
):
    """Its embedding is NaN, at the first token after a prompt or in the middle of an answer."""
    served = load_tiny("qwen3_vl")
    healthy = EngineHarness(*served).answer(ask("healthy", "a text"))
    sick = EngineHarness(*served)
    answer = sick.answer(ask("sick", "How many buttons?"))
    prompt = sick.prompts["sick"].token_ids.tolist()
    only = set(prompt if where == "prompt" else answer[2:-1])
    poison = min(
        only - set(healthy) - set(prompt_of(served[1], ask("", "a text")).token_ids.tolist())
    )
    embedding = served[0].language_model.model.embed_tokens
    whole = embedding.weight
    embedding.weight = mx.where(mx.arange(len(whole))[:, None] == poison, mx.nan, whole)
    try:
        engine = EngineHarness(*served)
        engine.add(ask("healthy", "a text"))
        engine.add(ask("sick", "How many buttons?"))
        engine.run()
    finally:
        embedding.weight = whole
    assert engine.tokens["healthy"] == healthy
    failed = engine.ends["sick"]
    assert isinstance(failed, Failed)
    assert "NaN" in failed.message
    told = engine.tokens.get("sick", [])
    assert told == answer[: answer.index(poison) + 1 if where == "answer" else 0]


# ---- log probabilities ---------------------------------------------------------------


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
