"""A trained model writes English, and the same tokens as mlx-vlm's, whatever runs beside it.

Random models try every kernel; this one has real weights, a real tokenizer and real text.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_vlm
import pytest

from scripts.trained_model import in_halves
from tests.integration.harness import (
    EngineHarness,
    Part,
    Served,
    ask,
    cached_tokens,
    caches_of,
    conversation,
    load_model,
    new_preparer,
)
from tests.integration.test_families import mlx_vlm_tokens
from tests.support.images import random_image
from tests.support.trained import trained_checkpoint
from vlm_server.protocol import SamplingParams

pytestmark = pytest.mark.whole

SAMPLING = SamplingParams(max_tokens=24, temperature=0.0)
TEXTS: dict[str, tuple[Part, ...]] = {
    "capital": ("What is the capital of France?",),
    "sea": ("Write two sentences about the sea.",),
    "code": ("Write a Python function that adds two numbers: `def add(x, y):` … 世界 😀",),
}
IMAGES: dict[str, tuple[Part, ...]] = {
    "capital": TEXTS["capital"],
    "image": (random_image(1), "What is the capital of France?"),
}


def served_from(*, has_vision: bool) -> Served:
    loaded = load_model(trained_checkpoint(has_vision=has_vision))
    return loaded, new_preparer(loaded)


@pytest.fixture(scope="module")
def served() -> Served:
    return served_from(has_vision=False)


@pytest.fixture(scope="module")
def alone(served: Served) -> EngineHarness:
    """An engine that has answered all TEXTS, each alone."""
    engine = EngineHarness(*served)
    for name, parts in TEXTS.items():
        engine.answer(ask(name, *parts, sampling=SAMPLING))
    return engine


@cache
def mlx_vlms(folder: Path) -> tuple[Any, Any]:
    return mlx_vlm.load(str(folder))


def tokens_of_mlx_vlm(engine: EngineHarness, name: str) -> list[int]:
    model, processor = mlx_vlms(trained_checkpoint())
    ids = mx.array(engine.prompts[name].token_ids)[None]
    results = mlx_vlm.stream_generate(
        model,
        processor,
        "",
        input_ids=ids,
        mask=mx.ones_like(ids),
        pixel_values=None,
        max_tokens=SAMPLING.max_tokens,
        temperature=0.0,
    )
    return [int(result.token) for result in results][: SAMPLING.max_tokens]


def test_trained_model_writes_sensible_english(alone: EngineHarness):
    assert alone.texts["capital"] == "The capital of France is Paris."
    assert alone.texts["sea"].startswith("The sea is a vast")


@pytest.mark.parametrize("name", TEXTS)
def test_usable_tokens_equal_mlx_vlms(alone: EngineHarness, name: str):
    assert alone.tokens[name] == tokens_of_mlx_vlm(alone, name)


@pytest.mark.parametrize("stagger", [0, 3])
def test_batched_trained_answers_equal_answers_alone(
    served: Served, alone: EngineHarness, stagger: int
):
    engine = EngineHarness(*served, chunk_tokens=16 if stagger else 512)
    for name, parts in TEXTS.items():
        engine.add(ask(name, *parts, sampling=SAMPLING))
        engine.step(stagger)
    engine.run()
    assert engine.tokens == alone.tokens


def test_trained_answer_after_cached_prefix_equals_answer_alone(
    served: Served, alone: EngineHarness
):
    turns = (
        ("user", TEXTS["capital"]),
        ("assistant", (alone.texts["capital"],)),
        ("user", ("And of Italy?",)),
    )
    without = EngineHarness(*served)
    wanted = without.answer(conversation("again", *turns, sampling=SAMPLING))
    engine = EngineHarness(*served, caches=caches_of(served))
    engine.answer(ask("capital", *TEXTS["capital"], sampling=SAMPLING))
    assert engine.answer(conversation("again", *turns, sampling=SAMPLING)) == wanted
    assert cached_tokens(engine, "again") > len(alone.prompts["capital"].token_ids)


def test_trained_answer_with_drafts_equals_answer_without(served: Served):
    """The answer repeats its prompt, so that drafts are right, and then goes its own way."""
    sampling = SamplingParams(max_tokens=40, temperature=0.0)
    text = "the red fox, the blue fox, the red fox, the blue fox, the red fox,"
    plain, drafting = EngineHarness(*served), EngineHarness(*served, num_draft_tokens=15)
    request = ask("a", f"Repeat this and go on: {text}", sampling=sampling)
    wanted = plain.answer(request)
    assert drafting.answer(request)[:40] == wanted
    assert drafting.texts == plain.texts
    assert drafting.scheduler.stats().spec_accepted_tokens > 0


@pytest.mark.parametrize("name", IMAGES)
def test_usable_tokens_after_image_equal_mlx_vlms(name: str):
    loaded, preparer = served_from(has_vision=True)
    tokens = EngineHarness(loaded, preparer).answer(ask(name, *IMAGES[name], sampling=SAMPLING))
    model, processor = mlx_vlm.load(str(trained_checkpoint(has_vision=True)))
    its_own = replace(loaded, model=model, processor=processor)
    assert tokens == mlx_vlm_tokens(its_own, ("user", IMAGES[name]))


def test_rows_of_llama_cpp_are_put_back_into_halves():
    """Head by head, rows 0, 2, 4, ... are the first half, which RoPE rotates with the second."""
    rows = mx.arange(16).reshape(16, 1)
    assert in_halves(rows, heads=2).flatten().tolist() == [
        *(0, 2, 4, 6, 1, 3, 5, 7),
        *(8, 10, 12, 14, 9, 11, 13, 15),
    ]
