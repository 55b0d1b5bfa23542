"""A prompt that is prefilled in padded chunks gets the same answer as without padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from mlx_vlm.models.cache import KVCache, make_prompt_cache

from tests.integration.harness import EngineHarness, Served, caches_of, new_preparer
from tests.integration.prompts import answer_in_pairs
from tests.support.mechanisms import WHOLE
from tests.support.whole_run import few_of
from vlm_server.interfaces.model_spec import ChunkPolicy
from vlm_server.runner.backends.cuda.attention import CudaBackend
from vlm_server.runner.device.device import DeviceKind
from vlm_server.runner.kv.window_cache import buffer_capacity
from vlm_server.runner.model.chunks import PaddedChunk, PaddedChunkCache
from vlm_server.runner.model.deepstack import Deepstack
from vlm_server.runner.model.lm_head import has_last_token_head
from vlm_server.runner.prefill import prefill

pytestmark = pytest.mark.families("deepstack", "caches")


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[PaddedChunk]:
    """The padded chunks that are prefilled from now on: multiples of 16 tokens."""
    padded = list[PaddedChunk]()

    class Watched(PaddedChunkCache):
        def __init__(self, cache: KVCache, chunk: PaddedChunk) -> None:
            padded.append(chunk)
            super().__init__(cache, chunk)

    monkeypatch.setattr(prefill, "PaddedChunkCache", Watched)
    monkeypatch.setattr(CudaBackend, "prefill_padding_tokens", 16)
    return padded


def served_on(kind: DeviceKind, served: Served) -> Served:
    loaded, preparer = served
    return replace(loaded, device=replace(loaded.device, kind=kind)), preparer


@pytest.mark.parametrize("chunk_tokens", few_of([512, 21], [21]))
@pytest.mark.parametrize("is_cached", [False, True])
def test_padded_chunk_answers_equal_unpadded_answers(
    served: Served,
    answered_in_pairs: list[list[int]],
    chunks: list[PaddedChunk],
    chunk_tokens: int,
    is_cached: bool,
):
    caches = {"caches": caches_of(served)} if is_cached else {}
    engine = EngineHarness(*served_on(DeviceKind.CUDA, served), chunk_tokens=chunk_tokens, **caches)
    assert answer_in_pairs(engine) == answered_in_pairs
    layers = make_prompt_cache(served[0].language_model)
    by_place = served[0].family.deepstack is Deepstack.BY_PLACE
    if by_place or any(type(layer) is not KVCache for layer in layers):
        assert not chunks, "what comes after a token would change what such layers hold"
        return
    if served[0].family.name in WHOLE or not has_last_token_head(served[0].language_model):
        assert not chunks, "logits would be of padding, or tokens attend to it"
        return
    assert {chunk.first % 16 for chunk in chunks} == {chunk.last % 16 for chunk in chunks} == {0}
    assert any(chunk.num_after for chunk in chunks)
    if is_cached or chunk_tokens < 30:
        assert any(chunk.first < chunk.start for chunk in chunks)


@pytest.mark.parametrize("chunk_tokens", few_of([512, 21], [21]))
def test_cpu_prefill_has_no_padded_chunks(
    served: Served,
    answered_in_pairs: list[list[int]],
    chunks: list[PaddedChunk],
    chunk_tokens: int,
):
    engine = EngineHarness(*served_on(DeviceKind.CPU, served), chunk_tokens=chunk_tokens)
    assert answer_in_pairs(engine) == answered_in_pairs
    assert not chunks


def test_atomic_prompts_are_not_padded(
    chunks: list[PaddedChunk], load_tiny: Callable[[str], Served]
):
    """As in families that allow no chunks: all tokens see each other."""
    loaded, _ = served_on(DeviceKind.CUDA, load_tiny("qwen3_vl"))
    loaded = replace(loaded, spec=replace(loaded.spec, chunk_policy=ChunkPolicy.NOWHERE))
    engine = EngineHarness(loaded, new_preparer(loaded))
    answer_in_pairs(engine)
    assert all(prompt.is_atomic for prompt in engine.prompts.values())
    assert not chunks


def test_padded_chunk_is_minimal_around_its_tokens():
    assert PaddedChunk.around(70, 400, 256) == PaddedChunk(70, 400, 0, 512)
    assert PaddedChunk.around(256, 512, 256).is_exact
    assert PaddedChunk.around(0, 1, 256).is_exact, "one token has a kernel of its own"
    assert PaddedChunk.around(70, 400, 1).is_exact


def test_padded_chunk_fits_prompts_buffer_capacity():
    for num_tokens in range(1, 2000):
        chunk = PaddedChunk.around(num_tokens // 2, num_tokens, CudaBackend.prefill_padding_tokens)
        assert chunk.last <= buffer_capacity(num_tokens)
