"""How tokens are drawn: greedy, the nucleus, and the same by seed whatever runs beside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from tests.integration.harness import GREEDY, Engine, ask
from tests.tiny_models.pictures import picture
from vlm_server.protocol import SamplingParams
from vlm_server.runner.loading import LoadedModel
from vlm_server.runner.preparer import MultimodalPreparer
from vlm_server.runner.sampler import RowSampler, sample

PROBABILITIES = np.array([0.15, 0.05, 0.3, 0.4, 0.1])
LIKELIEST = 3
LOGITS = mx.array(np.log(PROBABILITIES).astype(np.float32))
DRAWS = 1500


def draws(temperature: float, top_p: float, seed: int = 0, count: int = DRAWS) -> list[int]:
    """Token ids that one row draws in a run."""
    row = RowSampler(temperature, top_p, seed)
    tokens = []
    for _ in range(count):
        tokens.append(row.draw(LOGITS))
        row.step += 1
    return [int(i) for i in np.array(mx.stack(tokens))]


def shares(tokens: list[int]) -> np.ndarray:
    counts = Counter(tokens)
    return np.array([counts[i] / len(tokens) for i in range(len(PROBABILITIES))])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_the_temperature_says(temperature: float):
    expected = PROBABILITIES ** (1 / temperature)
    expected /= expected.sum()
    assert shares(draws(temperature, 1.0)) == pytest.approx(expected, abs=0.04)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.0, 1), (0.39, 1), (0.41, 2), (0.71, 3), (0.9, 4), (0.96, 5), (1e-9, 1)]
)
def test_top_p_keeps_the_nucleus_and_its_proportions(top_p: float, kept: int):
    least = np.sort(PROBABILITIES)[-kept]
    expected = np.where(least <= PROBABILITIES, PROBABILITIES, 0)
    found = shares(draws(1.0, top_p))
    assert found == pytest.approx(expected / expected.sum(), abs=0.04)
    assert not found[expected == 0].any()


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-38, 1e-45, 1e-60])
def test_a_tiny_temperature_is_greedy(temperature: float):
    assert set(draws(temperature, 1.0, count=50)) == {LIKELIEST}
    assert set(draws(temperature, 0.5, count=50)) == {LIKELIEST}


def test_a_tiny_temperature_is_greedy_with_large_logits_of_either_sign():
    for logits in ([79.0, 80.0, 5.0], [-6.0, -5.0, -80.0]):
        row = RowSampler(1e-37, 1.0, 0)
        tokens = [int(row.draw(mx.array(logits)).item()) for _ in range(20)]
        assert set(tokens) == {1}


def test_temperature_0_takes_the_largest():
    rows = [RowSampler(0.0, 1.0, seed) for seed in range(8)]
    logits = mx.array(np.random.default_rng(0).normal(size=(8, 50)).astype(np.float32))
    assert sample(logits, rows).tolist() == mx.argmax(logits, axis=-1).tolist()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_greedy_and_drawn_rows_share_a_batch(dtype: mx.Dtype):
    logits = mx.array(np.random.default_rng(0).normal(size=(4, 50)), dtype=dtype)
    rows = [RowSampler(0.0, 1.0, 1), RowSampler(1.0, 0.9, 2), RowSampler(0.0, 1.0, 3)]
    rows.append(RowSampler(0.7, 1.0, 4))
    together = sample(logits, rows).tolist()
    apart = [
        sample(logits[i : i + 1], [RowSampler(row.temperature, row.top_p, row.seed)]).item()
        for i, row in enumerate(rows)
    ]
    assert together == apart
    assert [row.step for row in rows] == [1] * 4


def test_seeds_and_steps_all_draw_differently():
    runs = {tuple(draws(2.0, 1.0, seed, 30)) for seed in (0, 1, 2, 2**31, 2**32, 2**63 - 1)}
    assert len(runs) == 6


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63, 2**64 - 1, 2**70])
def test_any_whole_number_is_a_seed(seed: int):
    assert draws(1.0, 1.0, seed, 5) == draws(1.0, 1.0, seed, 5)


def test_without_a_seed_runs_differ():
    seeds = {RowSampler.of(SamplingParams(temperature=1.0)).seed for _ in range(4)}
    assert len(seeds) == 4


# ---- in the engine -------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(
    load_tiny: Callable[[str], tuple[LoadedModel, MultimodalPreparer]],
) -> Callable[[], Engine]:
    return lambda: Engine(*load_tiny("qwen3_vl"))


def drawn(seed: int | None, **changes: float) -> SamplingParams:
    values = {"temperature": 1.5, "top_p": 0.95} | changes
    return SamplingParams(max_tokens=20, seed=seed, **values)


def test_a_seed_gives_the_same_tokens_whatever_runs_beside(engine: Callable[[], Engine]):
    alone = engine().answer(ask("a", picture(1), "what?", sampling=drawn(7)))
    beside = engine()
    beside.add(ask("greedy", "a text", sampling=GREEDY))
    beside.step(3)
    beside.add(ask("other", picture(2), "and?", sampling=drawn(None)))
    beside.add(ask("a", picture(1), "what?", sampling=drawn(7)))
    beside.add(ask("twin", picture(1), "what?", sampling=drawn(7)))
    beside.add(ask("sibling", picture(1), "what?", sampling=drawn(8)))
    beside.run()
    assert beside.tokens["a"] == alone
    assert beside.tokens["twin"] == alone
    assert beside.tokens["sibling"] != alone


def test_greedy_is_greedy_beside_drawn_rows(engine: Callable[[], Engine]):
    alone = engine().answer(ask("a", "a text"))
    beside = engine()
    beside.add(ask("drawn", "a text", sampling=drawn(1)))
    beside.add(ask("a", "a text"))
    beside.run()
    assert beside.tokens["a"] == alone
    assert beside.tokens["drawn"] != alone
