"""Atomic prompts: chunk policy, chunks, and cache hits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.integration.harness import (
    EngineHarness,
    Part,
    Served,
    ask,
    caches_of,
    conversation,
    load_model,
    new_preparer,
    prompt_of,
)
from tests.support.images import random_image
from tests.tiny_models import build
from vlm_server.protocol import SamplingParams, Submit
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.loading.probe import chunk_policy

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
A, B = random_image(1), random_image(2)
QUESTION = "What is on the left of it, and what is below?"
SYSTEM = ("system", ("You look at screenshots and answer in short words.",))


@pytest.fixture
def gemma4(load_tiny: Callable[[str], Served]) -> Served:
    return load_tiny("gemma4")


@pytest.fixture
def never_chunked(tmp_path: Path) -> Served:
    """A model of a family that allows no chunks of any prompt, as PaliGemma."""
    loaded = load_model(build("gemma4", tmp_path))
    loaded.language_model.no_chunked_prefill = True
    return probed_anew(loaded)


def probed_anew(loaded: LoadedModel) -> Served:
    host = replace(loaded.spec, chunk_policy=chunk_policy(loaded.model))
    loaded = replace(loaded, spec=host)
    return loaded, new_preparer(loaded)


def greedy_request(name: str, *parts: Part) -> Submit:
    return ask(name, *parts, sampling=GREEDY)


def talk(name: str, *turns: tuple[str, tuple[Part, ...]]) -> Submit:
    return conversation(name, SYSTEM, *turns, sampling=GREEDY)


def cached_tokens(engine: EngineHarness, name: str) -> int:
    return engine.ends[name].usage.cached_tokens


def chunk_ends(engine: EngineHarness, submit: Submit) -> list[int]:
    """The end of each chunk of a request that runs alone."""
    engine.add(submit)
    engine.step(2)
    request = engine.scheduler._requests[submit.request_id]
    ends = [request.num_prefilled] if request.num_prefilled else []
    while request.num_prefilled < request.prompt.num_tokens:
        engine.step()
        ends += [request.num_prefilled] if [request.num_prefilled] != ends[-1:] else []
    engine.run()
    return [end for end in ends if end]


def test_prompt_is_atomic_up_to_last_image(gemma4: Served):
    prompt = prompt_of(gemma4[1], greedy_request("a", "First", A, "and then", B, QUESTION))
    assert prompt.atomic_prefill_tokens == prompt.spans[-1].end < prompt.num_tokens
    assert prompt.token_types is not None
    shown = prompt.token_ids == gemma4[0].spec.image_token_id
    assert np.array_equal(prompt.token_types, shown)
    assert shown.sum() == sum(span.end - span.start for span in prompt.spans)
    text = prompt_of(gemma4[1], greedy_request("b", QUESTION))
    assert (text.atomic_prefill_tokens, text.token_types) == (0, None)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "gemma3", "llava"])
def test_causal_families_have_no_atomic_prefill_tokens(
    load_tiny: Callable[[str], Served], family: str
):
    prompt = prompt_of(load_tiny(family)[1], greedy_request("a", "First", A, QUESTION))
    assert (prompt.atomic_prefill_tokens, prompt.token_types) == (0, None)


def test_chunks_begin_after_last_image(gemma4: Served):
    submit = greedy_request("a", "First", A, "and then", B, QUESTION)
    prompt = prompt_of(gemma4[1], submit)
    first, last = prompt.atomic_prefill_tokens, prompt.num_tokens
    ends = chunk_ends(EngineHarness(*gemma4, chunk_tokens=7), submit)
    assert ends == [*range(first, last, 7), last]


def test_image_tokens_attend_to_each_other(gemma4: Served):
    """The tests against mlx-vlm would not tell if the mask changed nothing."""
    loaded, preparer = gemma4
    submit = greedy_request("a", A, QUESTION)
    whole = EngineHarness(loaded, preparer).answer(submit)
    loaded.language_model.config.use_bidirectional_attention = None
    try:
        causal = probed_anew(loaded)
        assert prompt_of(causal[1], submit).atomic_prefill_tokens == 0
        assert EngineHarness(*causal).answer(submit) != whole
    finally:
        loaded.language_model.config.use_bidirectional_attention = "vision"


def test_question_about_cached_image_resumes_after_image(gemma4: Served):
    engine, plain = EngineHarness(*gemma4, caches=caches_of(gemma4)), EngineHarness(*gemma4)
    first = ("user", (A, QUESTION))
    engine.answer(talk("first", first))
    more = (("assistant", (engine.texts["first"],)), ("user", ("And on the right?",)))
    follow_up = talk("second", first, *more)
    assert engine.answer(follow_up) == plain.answer(follow_up)
    assert cached_tokens(engine, "second") > engine.prompts["first"].spans[-1].end
    other = talk("other", ("user", (A, "How many are there?")))
    assert engine.answer(other) == plain.answer(other)
    assert cached_tokens(engine, "other") == engine.prompts["other"].spans[-1].end


def test_cached_prefix_before_new_image_is_not_used(gemma4: Served):
    engine, plain = EngineHarness(*gemma4, caches=caches_of(gemma4)), EngineHarness(*gemma4)
    first = ("user", (A, QUESTION))
    engine.answer(talk("first", first))
    more = (("assistant", (engine.texts["first"],)), ("user", (B, "And here?")))
    follow_up = talk("second", first, *more)
    assert engine.answer(follow_up) == plain.answer(follow_up)
    assert cached_tokens(engine, "second") == 0
    assert engine.preparers.num_uncached_spans["second"] == 2
    assert engine.preparers.num_read["second"] == 1, "the first one's features are cached"


def test_concurrent_prompts_with_shared_prefix_answer_as_alone(gemma4: Served):
    """The second look-up, at a prompt's turn, may not end inside the atomic part either."""
    engine, plain = (
        EngineHarness(*gemma4, caches=caches_of(gemma4), chunk_tokens=7),
        EngineHarness(*gemma4),
    )
    submits = [talk("A", ("user", (A, QUESTION))), talk("A B", ("user", (A, "or", B, QUESTION)))]
    submits.append(talk("A again", ("user", (A, "How many?"))))
    for submit in submits:
        engine.add(submit)
    engine.run()
    for submit in submits:
        assert engine.tokens[submit.request_id] == plain.answer(submit)
    assert cached_tokens(engine, "A B") == 0


def test_never_chunked_family_stores_no_prefixes(never_chunked: Served):
    caches = caches_of(never_chunked)
    engine, plain = (
        EngineHarness(*never_chunked, caches=caches, chunk_tokens=7),
        EngineHarness(*never_chunked),
    )
    for number, parts in enumerate([(QUESTION,), (A, QUESTION), (A, QUESTION)]):
        submit = greedy_request(f"{number}", *parts)
        prompt = prompt_of(never_chunked[1], submit)
        assert prompt.atomic_prefill_tokens == prompt.num_tokens
        assert chunk_ends(engine, submit) == [prompt.num_tokens]
        assert engine.tokens[f"{number}"] == plain.answer(submit)
        assert cached_tokens(engine, f"{number}") == 0
    assert not caches.prefixes.stats().entries
