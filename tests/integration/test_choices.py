"""Choices of one prefill each equal a single request with their seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import msgspec
import pytest

from tests.integration.harness import GREEDY, EngineHarness, NewEngine, Served, ask
from tests.integration.prompts import LONGER, PROMPTS, prompt_request
from tests.support.active_memory import active_bytes
from tests.support.images import random_image
from vlm_server.interfaces import SeqId
from vlm_server.protocol import Failed, Finished, SamplingParams
from vlm_server.runner.sampling import choice_params

pytestmark = pytest.mark.families("caches")


def with_choices(params: SamplingParams, n: int) -> SamplingParams:
    return msgspec.structs.replace(params, n=n)


def sampled_params(seed: int | None, n: int = 1, **changes: Any) -> SamplingParams:
    values = {"temperature": 1.5, "top_p": 0.95, "max_tokens": 20} | changes
    return SamplingParams(seed=seed, n=n, **values)


def tokens_of(engine: EngineHarness, name: str, n: int) -> list[list[int]]:
    return [engine.seqs[SeqId(name, choice)] for choice in range(n)]


# ---- every family's caches -----------------------------------------------------------


@pytest.fixture(scope="session")
def greedy_answer(served: Served) -> Callable[[str], list[int]]:
    return lambda name: EngineHarness(*served).answer(prompt_request(name, LONGER))


def test_greedy_choices_equal_answer_alone_in_any_batch(
    new_engine: NewEngine, greedy_answer: Callable[[str], list[int]]
):
    engine = new_engine(chunk_tokens=16)
    engine.add(prompt_request("long", LONGER))
    engine.step(4)
    engine.add(prompt_request("images", with_choices(LONGER, 3)))
    engine.step_until(lambda: len(engine.tokens.get("images", [])) >= 5)
    engine.add(prompt_request("image"))
    engine.run()
    assert tokens_of(engine, "images", 3) == [greedy_answer("images")] * 3
    assert engine.tokens["long"] == greedy_answer("long")
    assert engine.tokens["image"] == greedy_answer("image")[:10]


def test_choices_equal_single_requests_with_their_seeds(new_engine: NewEngine):
    engine = new_engine()
    params = sampled_params(7, n=4)
    engine.answer(ask("a", *PROMPTS["image"], sampling=params))
    for choice, tokens in enumerate(tokens_of(engine, "a", 4)):
        alone = with_choices(choice_params(params, choice), 1)
        assert tokens == new_engine().answer(ask("b", *PROMPTS["image"], sampling=alone))


def test_choices_ending_early_leave_their_siblings_unchanged(new_engine: NewEngine):
    """The stop string is a character that the choices come to at steps of their own."""
    free = new_engine()
    params = sampled_params(3, n=6, max_tokens=40)
    free.answer(prompt_request("text", params))
    whole = tokens_of(free, "text", 6)
    told = list(free.seq_texts.values())
    stop = max(sorted(set("".join(told))), key=lambda each: len({t.find(each) for t in told}))
    engine = new_engine()
    engine.add(prompt_request("image", LONGER))
    engine.answer(prompt_request("text", msgspec.structs.replace(params, stop=(stop,))))
    choices = tokens_of(engine, "text", 6)
    assert len(set(map(len, choices))) > 2, "all end together: nothing was tried"
    assert choices == [ids[: len(found)] for ids, found in zip(whole, choices, strict=True)]
    assert [engine.seq_texts[SeqId("text", i)] for i in range(6)] == [
        free.seq_texts[SeqId("text", i)].partition(stop)[0] for i in range(6)
    ]
    end = engine.ends["text"]
    assert isinstance(end, Finished)
    assert end.usage.completion_tokens == sum(map(len, choices))
    assert end.usage.prompt_tokens == engine.prompts["text"].num_tokens


def test_aborted_choices_leave_other_answers_unchanged(
    new_engine: NewEngine, greedy_answer: Callable[[str], list[int]]
):
    engine = new_engine()
    engine.add(prompt_request("long", LONGER))
    engine.add(prompt_request("image", with_choices(LONGER, 4)))
    engine.step_until(lambda: len(engine.tokens.get("image", [])) >= 5)
    engine.abort("image")
    engine.run()
    assert engine.tokens["long"] == greedy_answer("long")
    assert tokens_of(engine, "image", 4) == [greedy_answer("image")[:5]] * 4


# ---- one family ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine_of(load_tiny: Callable[[str], Served]) -> Callable[..., EngineHarness]:
    return lambda **limits: EngineHarness(*load_tiny("qwen3_vl"), **limits)


@pytest.mark.parametrize("max_num_seqs", [5, 8, 16])
def test_seeded_choices_do_not_depend_on_batch(
    engine_of: Callable[..., EngineHarness], max_num_seqs: int
):
    parts = (random_image(1), "what?")
    alone = engine_of()
    alone.answer(ask("a", *parts, sampling=sampled_params(7, n=4)))
    expected = tokens_of(alone, "a", 4)
    beside = engine_of(max_num_seqs=max_num_seqs, chunk_tokens=16)
    beside.add(ask("greedy", "a text", sampling=GREEDY))
    beside.step(3)
    beside.add(ask("other", random_image(2), "and?", sampling=sampled_params(None, n=3)))
    beside.add(ask("a", *parts, sampling=sampled_params(7, n=4)))
    beside.add(ask("sibling", *parts, sampling=sampled_params(8, n=2)))
    beside.run()
    assert tokens_of(beside, "a", 4) == expected
    assert not [tokens for tokens in tokens_of(beside, "sibling", 2) if tokens in expected]


@pytest.mark.parametrize("seed", [0, 1, 7, -1, -(2**63), 2**63 - 1, None])
def test_sampled_choices_differ(engine_of: Callable[..., EngineHarness], seed: int | None):
    engine = engine_of()
    engine.answer(ask("a", "a text", sampling=sampled_params(seed, n=8)))
    assert len({tuple(tokens) for tokens in tokens_of(engine, "a", 8)}) == 8


def test_consecutive_seeds_share_no_choice():
    params = [SamplingParams(seed=seed) for seed in (*range(50), -1, -2, 2**63 - 1)]
    seeds = [choice_params(each, choice).seed for each in params for choice in range(8)]
    assert len(set(seeds)) == len(seeds)


def test_first_choice_equals_single_choice_request(engine_of: Callable[..., EngineHarness]):
    one = engine_of().answer(ask("a", "a text", sampling=sampled_params(5)))
    assert engine_of().answer(ask("a", "a text", sampling=sampled_params(5, n=3))) == one


def test_penalties_are_counted_per_choice(engine_of: Callable[..., EngineHarness]):
    params = sampled_params(5, n=3, frequency_penalty=1.5, repetition_penalty=1.5)
    engine = engine_of()
    engine.answer(ask("a", "a text", sampling=params))
    for choice, tokens in enumerate(tokens_of(engine, "a", 3)):
        alone = with_choices(choice_params(params, choice), 1)
        assert tokens == engine_of().answer(ask("b", "a text", sampling=alone))


def test_choice_with_nan_logits_fails_only_its_request(
    engine_of: Callable[..., EngineHarness],
):
    """A token that one choice draws has an embedding of NaN."""
    params = sampled_params(7, n=3)
    well = engine_of()
    healthy = well.answer(ask("healthy", "another text", sampling=LONGER))
    well.answer(ask("sick", "a text", sampling=params))
    first, *others = tokens_of(well, "sick", 3)
    known = {*healthy, *others[0], *others[1], *well.prompts["healthy"].token_ids.tolist()}
    poison = min(set(first[1:-1]) - known - set(well.prompts["sick"].token_ids.tolist()))
    embedding = well.loaded.language_model.model.embed_tokens
    whole = embedding.weight
    embedding.weight = mx.where(mx.arange(len(whole))[:, None] == poison, mx.nan, whole)
    try:
        engine = engine_of()
        engine.add(ask("healthy", "another text", sampling=LONGER))
        engine.add(ask("sick", "a text", sampling=params))
        engine.run()
    finally:
        embedding.weight = whole
    assert isinstance(engine.ends["sick"], Failed)
    assert engine.tokens["healthy"] == healthy
    assert engine.tokens["sick"] == first[: first.index(poison) + 1]


def test_choices_return_their_device_memory(engine_of: Callable[..., EngineHarness]):
    engine = engine_of()

    def held_after(name: str, n: int, steps: int | None = None) -> int:
        engine.add(ask(name, random_image(1), "Hello", sampling=sampled_params(1, n=n)))
        if steps is not None:
            engine.step(steps)
            engine.abort(name)
        engine.run()
        return active_bytes()

    held_after("first", 8)
    baseline = held_after("one", 1)
    assert held_after("eight", 8) <= baseline
    assert held_after("aborted", 8, steps=6) <= baseline
