"""Cached KV of 8 or 4 bits: each hit equals the first, and what is stored stays as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import pytest

from tests.integration.harness import (
    EngineHarness,
    Served,
    Turns,
    ask,
    cached_tokens,
    caches_of,
    conversation,
)
from tests.support.active_memory import active_bytes
from tests.support.images import random_image
from tests.support.integrity import check_integrity
from tests.support.mechanisms import UNSTORED
from vlm_server.cache.kv_storage import KVStorage
from vlm_server.interfaces import MemoryReading, PreparedPrompt
from vlm_server.protocol import LAST_WRITES_SECONDS, SamplingParams, Submit
from vlm_server.runner.caches import build_caches
from vlm_server.runner.kv.layers import needs_snapshots, new_layers
from vlm_server.runner.kv.window_cache import WindowKVCache
from vlm_server.settings import CacheSettings

pytestmark = pytest.mark.families("caches")

LOTS = 64 << 20
TOLERATED_BYTES = 16 << 10
"""What MLX leaves of a buffer without a copy of the array in it, such as a window's columns."""
SAMPLING = SamplingParams(max_tokens=8, temperature=0.0, logprobs=3)
IMAGE = random_image(1)
QUESTION = "What is on the left of it, and what is below?"
Answer = tuple[list[int], list[object]]
"""Tokens, and their log probabilities."""


def question(request_id: str) -> Submit:
    return ask(request_id, "Look", IMAGE, QUESTION, sampling=SAMPLING)


def answer(engine: EngineHarness, submit: Submit) -> Answer:
    return engine.answer(submit), list(engine.logprobs[submit.request_id])


def stored_kv(engine: EngineHarness, prompt: PreparedPrompt) -> list[mx.array]:
    """The arrays, codes and scales among them, that are stored of a prompt; evaluated."""
    match = engine.caches.prefixes.match(prompt.key, len(prompt.key), prompt.prefix_salt)
    segments = [[a[:, :, :count] for a in segment.arrays] for segment, count in match.segments]
    arrays = [mx.concatenate(parts, axis=2) for parts in zip(*segments, strict=True)]
    mx.eval(arrays)
    match.release()
    return arrays


@pytest.fixture(params=[8, 4])
def storage(request: pytest.FixtureRequest) -> KVStorage:
    return KVStorage(request.param)


@pytest.fixture(autouse=True)
def _stores_prefixes(served: Served) -> None:
    if served[0].family.name in UNSTORED:
        pytest.skip("its KV is not used again")


@pytest.fixture
def engine(served: Served, storage: KVStorage) -> Iterator[EngineHarness]:
    engine = EngineHarness(*served, caches=caches_of(served, storage))
    yield engine
    check_integrity(engine.caches)
    assert engine.caches.num_references == 0


def test_every_hit_equals_first_hit_bit_for_bit(engine: EngineHarness):
    miss = answer(engine, question("miss"))
    first = answer(engine, question("first hit"))
    assert miss[1] != first[1], "KV was quantized"
    for number in range(2):
        assert answer(engine, question(f"hit {number}")) == first
        assert cached_tokens(engine, f"hit {number}") == cached_tokens(engine, "first hit") > 0
    engine.add(question("one of two"))
    engine.add(question("other of two"))
    engine.run()
    assert engine.tokens["one of two"] == engine.tokens["other of two"] == first[0]


def test_growing_conversation_changes_no_bit_of_stored_prefix(
    engine: EngineHarness, served: Served, storage: KVStorage
):
    """However its parts are merged, and although each turn continues from what was dequantized."""
    turns: Turns = (("system", ("Answer in short words.",)),)
    prompt, before = None, list[mx.array]()
    for number in range(6):
        turns += (("user", (f"Step {number}", random_image(10 + number), "what changed?")),)
        submit = conversation(f"turn {number}", *turns, sampling=SAMPLING)
        engine.answer(submit)
        turns += (("assistant", (engine.texts[submit.request_id],)),)
        if prompt is None:
            prompt = engine.prompts[submit.request_id]
            before = stored_kv(engine, prompt)
            assert {mx.int8, mx.uint8} & {array.dtype for array in before}
    assert prompt is not None
    after = stored_kv(engine, prompt)
    length = min(array.shape[2] for array in (*before, *after))
    has_snapshots = needs_snapshots(engine.loaded.language_model)  # stored up to one of them
    assert length >= (0.8 if has_snapshots else 0.9) * len(prompt.key)
    for old, new in zip(before, after, strict=True):
        assert mx.array_equal(old[:, :, :length], new[:, :, :length])


@pytest.mark.families
def test_prefix_evicted_during_its_use_is_stored_again_as_it_was(
    load_tiny: Callable[[str], Served], storage: KVStorage
):
    """The whole prompt is stored from a sequence that began with dequantized KV."""
    served = load_tiny("qwen3_vl")
    engine = EngineHarness(*served, caches=caches_of(served, storage))
    answer(engine, question("miss"))
    prompt = engine.prompts["miss"]
    before = stored_kv(engine, prompt)
    engine.add(question("hit"))
    engine.step_until(lambda: len(engine.tokens.get("hit", ())) > 1)
    engine.caches.drop()
    assert not engine.caches.prefixes.stats().size_bytes, "while the hit decodes"
    engine.run()
    after = stored_kv(engine, prompt)
    num_cached = engine.ends["hit"].usage.cached_tokens
    assert num_cached > 0
    for old, new in zip(before, after, strict=True):
        assert mx.array_equal(old[:, :, :num_cached], new[:, :, :num_cached])


def test_prefix_cache_holds_bytes_that_it_reports(engine: EngineHarness, served: Served):
    answer(engine, question("miss"))
    answer(engine, ask("long", "long " * 90, sampling=SAMPLING))
    engine.caches.drop()
    baseline = active_bytes()
    for number in range(4):
        mx.clear_cache()  # MLX gives an array a buffer of the pool that may be larger
        answer(engine, ask(f"{number}", f"{number} " * 90, sampling=SAMPLING))
    reported = engine.caches.prefixes.stats().size_bytes
    held = active_bytes() - baseline
    layers = new_layers(served[0].language_model)
    num_copies = 4 * 2 * sum(isinstance(layer, WindowKVCache) for layer in layers)
    engine.caches.drop()
    assert active_bytes() <= 1.01 * baseline
    assert reported <= held + 4096
    assert held < 1.25 * reported + 65536 + TOLERATED_BYTES * num_copies
    exact = EngineHarness(*served, caches=caches_of(served))
    for number in range(4):
        answer(exact, ask(f"{number}", f"{number} " * 90, sampling=SAMPLING))
    assert reported < exact.caches.prefixes.stats().size_bytes


@contextmanager
def engine_on(
    served: Served, folder: Path, bits: int, *, quantize_running: bool = False
) -> Iterator[EngineHarness]:
    """A new engine with a disk cache in `folder`."""
    settings = CacheSettings(
        max_token_layout_bytes=LOTS,
        max_pixel_bytes=LOTS,
        max_encoder_bytes=LOTS,
        max_prefix_bytes=LOTS,
        kv_bits=bits,  # type: ignore[arg-type]
        quantize_running=quantize_running,
        max_disk_bytes=LOTS,
        disk_folder=str(folder),
    )
    caches = build_caches(settings, MemoryReading(0, 0, LOTS), served[0])
    caches.begin_serving()
    try:
        yield EngineHarness(*served, caches=caches)
    finally:
        caches.close(LAST_WRITES_SECONDS)
    check_integrity(caches)


def test_hit_on_disk_equals_hit_in_memory_and_other_bits_miss(
    served: Served, storage: KVStorage, tmp_path: Path
):
    with engine_on(served, tmp_path, storage.bits) as engine:
        miss = answer(engine, question("miss"))
        in_memory = answer(engine, question("hit"))
        num_cached = cached_tokens(engine, "hit")
        kv = stored_kv(engine, engine.prompts["miss"])
    with engine_on(served, tmp_path, storage.bits) as engine:
        assert answer(engine, question("hit")) == in_memory
        assert cached_tokens(engine, "hit") == num_cached > 0
        on_disk = stored_kv(engine, engine.prompts["hit"])
    for old, new in zip(kv, on_disk, strict=True):
        assert mx.array_equal(old[:, :, :num_cached], new[:, :, :num_cached])
    with engine_on(served, tmp_path, 16) as engine:
        assert answer(engine, question("exact")) == miss
        assert cached_tokens(engine, "exact") == 0
    with engine_on(served, tmp_path, storage.bits) as engine:
        assert answer(engine, question("hit")) == in_memory, "no block was replaced"


@pytest.mark.families
def test_auto_bits_are_exact_only_where_two_conversations_fit(
    load_tiny: Callable[[str], Served],
):
    loaded = load_tiny("qwen3_vl")[0]
    settings = CacheSettings(kv_bits="auto")

    def bits_with(free_bytes: int) -> int:
        return build_caches(settings, MemoryReading(0, 0, free_bytes), loaded).kv_storage.bits

    assert bits_with(1 << 30) == 16
    assert bits_with(1 << 20) == 8
    assert build_caches(CacheSettings(), MemoryReading(0, 0, 1 << 20), loaded).kv_storage.bits == 16
