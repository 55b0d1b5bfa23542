"""KV of running sequences with 8 or 4 bits: answers depend on nothing that runs or is cached."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from tests.integration.harness import (
    EngineHarness,
    Load,
    Served,
    ask,
    cached_tokens,
    caches_of,
    load_model,
    new_preparer,
)
from tests.integration.oracle import Oracle
from tests.integration.prompts import LONGER, PROMPTS, prompt_request
from tests.integration.test_compiled_model import compiled
from tests.integration.test_quantized_kv import LOTS, engine_on
from tests.support.active_memory import active_bytes
from tests.support.integrity import check_integrity
from tests.support.mechanisms import UNSTORED
from tests.tiny_models import TEXT_FAMILIES, cached
from vlm_server.cache.kv_storage import EXACT, KVStorage
from vlm_server.hub.examination import ExaminationRequest
from vlm_server.interfaces import MemoryReading
from vlm_server.protocol import Finished, SamplingParams
from vlm_server.runner.caches import build_caches
from vlm_server.runner.decode import sequence
from vlm_server.runner.kv.layers import can_store
from vlm_server.runner.loading.facts import examine
from vlm_server.runner.loading.probe import planned_state_size
from vlm_server.settings import CacheSettings, MemorySettings, ModelSettings

pytestmark = pytest.mark.families("caches")

SAMPLING = structs.replace(LONGER, logprobs=3)
MIB = 1 << 20


@pytest.fixture(params=[8, pytest.param(4, marks=pytest.mark.whole)], scope="module")
def storage(request: pytest.FixtureRequest) -> KVStorage:
    return KVStorage(request.param, of_running=True)


@pytest.fixture(scope="module")
def packing(served: Served, storage: KVStorage) -> Served:
    """A loaded model of each family whose sequences hold packed KV, and its preparer."""
    return with_storage(served, storage)


def with_storage(served: Served, storage: KVStorage) -> Served:
    if not can_store(served[0].language_model):
        pytest.skip("its layers are of kinds that are held exactly")
    return replace(served[0], kv_storage=storage), served[1]


@pytest.fixture(scope="module")
def alone(packing: Served) -> EngineHarness:
    """An engine that has answered all PROMPTS, each alone and prefilled whole."""
    engine = EngineHarness(*packing)
    for name in PROMPTS:
        engine.answer(prompt_request(name, SAMPLING))
    return engine


def run_all(engine: EngineHarness, stagger: int, suffix: str = "") -> dict[str, list[int]]:
    """The answers to all PROMPTS, each request named by its prompt's name and `suffix`."""
    for number, name in enumerate(PROMPTS):
        request = prompt_request(name, SAMPLING)
        engine.add(structs.replace(request, request_id=name + suffix))
        engine.step(stagger and stagger + number)
    engine.run()
    return {name: engine.tokens[name + suffix] for name in PROMPTS}


def logprobs(engine: EngineHarness, name: str) -> np.ndarray:
    return np.array([each.token.logprob for each in engine.logprobs[name]])


# ---- the same answers --------------------------------------------------------------------


def test_packed_kv_changes_answers_slightly(alone: EngineHarness, served: Served):
    exact = EngineHarness(*served)
    run_all(exact, 0)
    firsts = [(logprobs(alone, name)[0], logprobs(exact, name)[0]) for name in PROMPTS]
    errors = [abs(packed - plain) for packed, plain in firsts]
    assert 0 < max(errors) < (1 if alone.loaded.kv_storage.bits == 8 else 8)


@pytest.mark.parametrize(("stagger", "chunk"), [(0, 512), (3, 512), (3, 7)])
def test_batched_and_chunked_answers_of_packed_kv_equal_answers_alone(
    packing: Served, alone: EngineHarness, stagger: int, chunk: int
):
    engine = EngineHarness(*packing, chunk_tokens=chunk, max_prompts_per_prefill=4)
    assert run_all(engine, stagger) == alone.tokens
    assert engine.num_tracked == 0


def test_hits_of_packed_kv_equal_misses(packing: Served, alone: EngineHarness, storage: KVStorage):
    engine = EngineHarness(*packing, caches=caches_of(packing, storage))
    for turn in range(3):
        assert run_all(engine, 2, f" {turn}") == alone.tokens
    is_stored = packing[0].family.name not in UNSTORED
    assert bool(cached_tokens(engine, "long 2")) == is_stored
    check_integrity(engine.caches)
    assert engine.caches.num_references == 0


def test_drafted_answers_of_packed_kv_equal_plain_ones(
    packing: Served, alone: EngineHarness, monkeypatch: pytest.MonkeyPatch
):
    engine = EngineHarness(*packing, num_draft_tokens=5)
    if not engine.runner._groups._speculation.widths:
        pytest.skip("this family verifies no drafts")
    answers = dict[tuple[int, ...], list[list[int]]]()
    for name in PROMPTS:
        prompt = alone.prompts[name]
        answers.setdefault(tuple(prompt.token_ids.tolist()), []).append(alone.tokens[name])
    monkeypatch.setattr(sequence, "Drafter", Oracle(answers, 0.3))
    run_all(engine, 2)
    for name in PROMPTS:
        assert engine.tokens[name][: len(alone.tokens[name])] == alone.tokens[name]


def test_abort_among_packed_rows_leaves_answers_and_memory(packing: Served, alone: EngineHarness):
    engine = EngineHarness(*packing, chunk_tokens=16)
    run_all(engine, 0, " before")
    baseline = active_bytes()
    for name in ("long", "image", "images"):
        engine.add(prompt_request(name, SAMPLING))
        engine.step(2)
    engine.step_until(lambda: len(engine.tokens.get("images", ())) >= 3)
    engine.abort("images")
    engine.run()
    for name in ("long", "image"):
        assert engine.tokens[name] == alone.tokens[name]
    assert active_bytes() <= 1.01 * baseline


@pytest.mark.families
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_packed_steps_are_not_compiled(family: str, load_tiny: Load):
    served = with_storage(load_tiny(family), KVStorage(8, of_running=True))
    expected = run_all(EngineHarness(*served), 0)
    engine, model = compiled(served, 24, chunk_tokens=16)
    assert run_all(engine, 3) == expected
    assert not model.num_steps


@pytest.mark.parametrize(
    "family",
    ["deepseek_v3", "gpt_oss", *(pytest.param(n, marks=pytest.mark.whole) for n in TEXT_FAMILIES)],
)
@pytest.mark.families
def test_text_answers_of_packed_kv_depend_on_nothing_else(family: str, load_tiny: Load):
    storage = KVStorage(8, of_running=True)
    served = with_storage(load_tiny(family), storage)
    prompts = {"short": "Hello there", "long": "The quick brown fox jumps over the dog. " * 6}
    alone = EngineHarness(*served)
    for name, text in prompts.items():
        alone.answer(ask(name, text, sampling=LONGER))
    engine = EngineHarness(*served, chunk_tokens=7, caches=caches_of(served, storage))
    for turn in range(2):
        for name, text in prompts.items():
            engine.add(ask(f"{name} {turn}", text, sampling=LONGER))
            engine.step(2)
        engine.run()
        for name in prompts:
            assert engine.tokens[f"{name} {turn}"] == alone.tokens[name]
    assert cached_tokens(engine, "long 1") > 0


# ---- stored on disk, and the settings ----------------------------------------------------


@pytest.mark.families
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_packed_kv_on_disk_is_found_only_by_engines_that_pack(
    family: str, load_tiny: Load, tmp_path: Path
):
    served = load_tiny(family)
    packing = with_storage(served, KVStorage(8, of_running=True))
    expected = EngineHarness(*packing).answer(prompt_request("long", SAMPLING))
    for turn in range(2):
        with engine_on(packing, tmp_path, 8, quantize_running=True) as engine:
            assert engine.answer(prompt_request("long", SAMPLING)) == expected
            assert bool(cached_tokens(engine, "long")) == bool(turn)
    with engine_on(served, tmp_path, 8) as engine:
        engine.answer(prompt_request("long", SAMPLING))
        assert cached_tokens(engine, "long") == 0


@pytest.mark.families
def test_setting_packs_quantized_kv_only(load_tiny: Load):
    def running(**cache: object) -> KVStorage:
        settings = CacheSettings(**cache)  # type: ignore[arg-type]
        loaded = load_tiny("qwen3_vl")[0]
        return build_caches(settings, MemoryReading(0, 0, LOTS), loaded).kv_storage.running

    assert running(kv_bits=8) == running(quantize_running=True) == EXACT
    assert running(kv_bits=4, quantize_running=True).bits == 4


# ---- memory ------------------------------------------------------------------------------


def live_bytes(served: Served, text: str) -> tuple[int, int]:
    """Bytes that a conversation holds while it decodes, and those planned for it."""
    engine = EngineHarness(*served)
    baseline = active_bytes()
    engine.add(ask("live", text, sampling=SamplingParams(max_tokens=8, temperature=0.0)))
    engine.step_until(lambda: len(engine.tokens.get("live", ())) >= 3)
    held = active_bytes() - baseline
    num_tokens = engine.prompts["live"].num_tokens + 8
    engine.run()
    assert isinstance(engine.ends["live"], Finished)
    loaded = served[0]
    plan = planned_state_size(loaded.language_model, None, loaded.kv_storage)
    learned, planned = engine.runner.kv_bytes(num_tokens), plan.bytes_for(num_tokens)
    assert learned == planned
    return held, planned


@pytest.mark.families
@pytest.mark.parametrize(("bits", "least"), [(8, 1.9), (4, 3.6)])
def test_live_conversation_takes_half_or_quarter_of_memory(bits: int, least: float):
    """Of 64 numbers a head, in 16 bits."""
    loaded = load_model(cached("qwen2_5_vl", "agent"), dtype="bfloat16")
    served = loaded, new_preparer(loaded)
    text = "The quick brown fox jumps over the lazy dog and runs away. " * 14
    exact, _ = live_bytes(served, text)
    packing = with_storage(served, KVStorage(bits, of_running=True))
    held, planned = live_bytes(packing, text)
    assert exact >= least * held
    two_of_four_layers = exact / 2  # which a step has unpacked
    assert held + two_of_four_layers <= 1.1 * planned <= 1.3 * (held + two_of_four_layers)


@pytest.mark.families
def test_examination_counts_packed_tokens():
    def fitting(cache: CacheSettings) -> int:
        model = ModelSettings(path=str(cached("qwen2_5_vl", "agent")))
        limit = MemorySettings(load_model(model.path).size_bytes + 64 * MIB)
        found = examine(ExaminationRequest(model, limit, cache=cache), 100)
        assert found.fitting_tokens is not None
        return found.fitting_tokens

    exact = fitting(CacheSettings(kv_bits=8))
    assert fitting(CacheSettings(kv_bits=8, quantize_running=True)) >= 1.2 * exact
