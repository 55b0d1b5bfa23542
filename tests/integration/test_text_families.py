"""Every text family answers like mlx-vlm, whatever runs beside it, and refuses images by name."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import mlx_vlm
import pytest
from mlx_vlm import stream_generate

from tests.integration.harness import (
    EngineHarness,
    Load,
    Part,
    Served,
    ask,
    conversation,
    new_preparer,
)
from tests.integration.test_compiled_model import compiled
from tests.support.active_memory import active_bytes
from tests.support.images import random_image
from tests.support.selection import CORE_TEXTS
from tests.tiny_models import TEXT_FAMILIES, WHOLE_PROMPTS, cached
from vlm_server.interfaces import MemoryReading
from vlm_server.protocol import Finished, SamplingParams
from vlm_server.runner.caches import build_caches
from vlm_server.runner.families.table import FAMILIES, row_of
from vlm_server.runner.kv.layers import can_store, new_layers
from vlm_server.runner.model.lm_head import has_last_token_head
from vlm_server.settings import CacheSettings

LONGER = SamplingParams(max_tokens=24, temperature=0.0)
PROMPTS: dict[str, tuple[Part, ...]] = {
    "short": ("Hello there",),
    "question": ("What is the capital of France, and why?",),
    "long": ("The quick brown fox jumps over the lazy dog and runs away. " * 6,),
}


def chosen(name: str) -> object:
    marks = [pytest.mark.xdist_group(f"text {name}")]
    marks += [] if name in CORE_TEXTS else [pytest.mark.whole]
    return pytest.param(name, id=name, marks=marks)


@pytest.fixture(scope="module", params=map(chosen, TEXT_FAMILIES))
def text_family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def served(text_family: str, load_tiny: Load) -> Served:
    return load_tiny(text_family)


@pytest.fixture(scope="module")
def alone(served: Served) -> EngineHarness:
    """An engine that has answered all PROMPTS, each alone and prefilled whole."""
    engine = EngineHarness(*served)
    for name, parts in PROMPTS.items():
        engine.answer(ask(name, *parts, sampling=LONGER))
    return engine


def add_all(engine: EngineHarness, stagger: int, suffix: str = "") -> None:
    for number, (name, parts) in enumerate(PROMPTS.items()):
        engine.add(ask(name + suffix, *parts, sampling=LONGER))
        engine.step(stagger and stagger + number)


@cache
def mlx_vlms(text_family: str) -> tuple[mx.array, object]:
    model, processor = mlx_vlm.load(str(cached(text_family)))
    model.set_dtype(mx.float32)
    row = row_of({"model_type": text_family})
    assert row is not None
    if fix := row.fix:
        fix(model, processor, {})
    return model, processor


def test_greedy_tokens_of_text_family_equal_mlx_vlms(text_family: str, alone: EngineHarness):
    model, processor = mlx_vlms(text_family)
    options = {"prefill_step_size": None} if text_family in WHOLE_PROMPTS else {}
    for name in PROMPTS:
        ids = mx.array(alone.prompts[name].token_ids)[None]
        results = stream_generate(
            model,
            processor,
            "",
            input_ids=ids,
            mask=mx.ones_like(ids),
            pixel_values=None,
            max_tokens=24,
            temperature=0.0,
            **options,
        )
        assert alone.tokens[name] == [int(result.token) for result in results][:24]


@pytest.mark.parametrize(("stagger", "chunk"), [(0, 512), (3, 512), (0, 7)])
def test_batched_and_chunked_text_answers_equal_answers_alone(
    served: Served, alone: EngineHarness, stagger: int, chunk: int
):
    engine = EngineHarness(*served, chunk_tokens=chunk)
    add_all(engine, stagger)
    engine.run()
    assert engine.tokens == alone.tokens
    assert engine.num_tracked == 0


@pytest.mark.parametrize(("mixed_step_tokens", "stagger"), [(0, 0), (64, 3)])
def test_compiled_text_answers_equal_uncompiled_ones(
    served: Served, alone: EngineHarness, mixed_step_tokens: int, stagger: int
):
    engine, _ = compiled(served, mixed_step_tokens)
    add_all(engine, stagger)
    engine.run()
    assert engine.tokens == alone.tokens


def test_answers_after_cached_text_prefix_equal_answers_alone(served: Served, alone: EngineHarness):
    """With the caches that a daemon builds, even where they can't store a prefix."""
    loaded = served[0]
    caches = build_caches(CacheSettings(), MemoryReading(0, 0, 1 << 30), loaded)
    engine = EngineHarness(loaded, new_preparer(loaded, caches=caches), caches=caches)
    for repetition in range(2):
        for name, parts in PROMPTS.items():
            request_id = f"{name} {repetition}"
            tokens = engine.answer(ask(request_id, *parts, sampling=LONGER))
            assert tokens == alone.tokens[name]
    end = engine.ends["long 1"]
    assert isinstance(end, Finished)
    assert (end.usage.cached_tokens > 200) == can_store(loaded.language_model)


def test_text_conversation_and_joining_request_keep_running_answer(
    served: Served, alone: EngineHarness
):
    turns = (
        ("system", ("You are brief.",)),
        ("user", ("Hi",)),
        ("assistant", ("Hello.",)),
        ("user", ("And now?",)),
    )
    engine = EngineHarness(*served, chunk_tokens=16)
    engine.add(ask("long", *PROMPTS["long"], sampling=LONGER))
    engine.step_until(lambda: len(engine.tokens.get("long", [])) >= 8)
    engine.add(conversation("talk", *turns))
    engine.add(ask("aborted", *PROMPTS["question"], sampling=LONGER))
    engine.step(3)
    engine.abort("aborted")
    engine.run()
    assert engine.tokens["long"] == alone.tokens["long"]
    assert engine.tokens["talk"] == EngineHarness(*served).answer(conversation("a", *turns))


def test_text_model_computes_tokens_as_their_embeddings(served: Served):
    """A prefill computes embeddings, a step tokens: both are in the same KV."""
    loaded = served[0]
    model, token_ids = loaded.language_model, mx.arange(300, 316)[None]
    both = [
        model(token_ids, cache=new_layers(model), **inputs).logits
        for inputs in ({}, loaded.embed_text(token_ids))
    ]
    loaded.forget_positions()
    assert mx.allclose(*both, atol=1e-4)


def test_image_or_video_for_text_model_is_refused_by_name(served: Served):
    engine = EngineHarness(*served)
    failed = engine.failure(ask("image", "What is", random_image(1), "this?"))
    assert failed.code == "invalid_value"
    assert failed.message.startswith(f"{served[0].family.name} reads text alone: remove the image")
    assert failed.param == "messages[0]"


def test_device_memory_returns_to_baseline_after_text_bursts(served: Served):
    engine = EngineHarness(*served)
    add_all(engine, 0)
    engine.run()
    baseline = active_bytes()
    for number in range(2):
        add_all(engine, 2, f" {number}")
        engine.run()
    assert active_bytes() <= baseline * 1.01
    assert engine.runner.num_tracked == 0


def test_context_with_learned_positions_ends_with_them(load_tiny: Load):
    assert load_tiny("gpt2")[0].spec.context_tokens == 512


@pytest.mark.parametrize("text_model", ["gpt2", "gpt_neox", "internlm2", "mamba2"])
def test_head_of_any_name_computes_last_token_alone(load_tiny: Load, text_model: str):
    assert has_last_token_head(load_tiny(text_model)[0].language_model)


def test_text_families_have_rows_and_tiny_checkpoints():
    writing = [family for family in FAMILIES.values() if family.embeds is None]
    rows = {family.name for family in writing if not family.reads_images}
    assert rows == {FAMILIES.get(name, FAMILIES["llama"]).name for name in TEXT_FAMILIES}
