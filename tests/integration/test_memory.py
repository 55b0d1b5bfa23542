"""Device memory with the real allocator: held and returned bytes, and out-of-memory errors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from tests.integration.harness import EngineHarness, Served, ask
from tests.support.active_memory import active_bytes
from tests.support.images import random_image
from vlm_server.errors import OutOfMemory
from vlm_server.platform import heap
from vlm_server.platform.footprint import SystemProcessMemory
from vlm_server.protocol import Failed, Finished
from vlm_server.runner import model_runner
from vlm_server.runner.decode.decode_batch import DecodeBatch
from vlm_server.runner.device.device import current_device
from vlm_server.runner.encode.encoder import ImageEncoding
from vlm_server.runner.kv.segments import StateSize
from vlm_server.runner.kv.window_cache import buffer_capacity
from vlm_server.runner.memory import MlxMemory
from vlm_server.runner.prefill.prefill import Prefill
from vlm_server.settings import MemorySettings

pytestmark = pytest.mark.families("caches")

MIB = 1 << 20
LONG = "word " * 120


@pytest.fixture
def memory():
    """The allocator's owner; its limits are taken back."""
    limits = mx.set_memory_limit(1 << 40), mx.set_cache_limit(1 << 40)
    yield MlxMemory(MemorySettings(max_bytes=1 << 34, max_pool_bytes=64 * MIB), current_device())
    mx.set_memory_limit(limits[0])
    mx.set_cache_limit(limits[1])


def test_freed_arrays_go_to_pool_and_clear_empties_it(memory: MlxMemory):
    memory.clear()
    before = memory.read()
    array = mx.zeros((MIB,))
    mx.eval(array)
    assert memory.read().active_bytes - before.active_bytes == 4 * MIB
    del array
    after = memory.read()
    assert after.active_bytes == before.active_bytes
    assert after.pool_bytes - before.pool_bytes >= 4 * MIB
    memory.clear()
    assert memory.read().pool_bytes == 0


def test_pool_stays_under_its_limit(memory: MlxMemory):
    for number in range(8):
        mx.eval(mx.zeros((5 * MIB + number,)))
    assert memory.read().pool_bytes <= memory.pool_limit_bytes


def test_peak_memory_is_reported_once(memory: MlxMemory):
    memory.read_peak()
    mx.eval(mx.zeros((MIB,)))
    active = memory.read().active_bytes
    assert memory.read_peak() >= active + 4 * MIB
    assert memory.read_peak() < active + 4 * MIB


def test_allocator_trims_pool_at_limit_where_backend_says_so():
    """After the free, the limit has room for the next allocation, but not for the pool besides."""
    mx.clear_cache()
    memory = MlxMemory(MemorySettings(max_bytes=active_bytes() + 96 * MIB), current_device())
    try:
        freed = [mx.ones((1 << size, MIB // 4)) for size in (4, 5)]  # 16 and 32 MiB
        mx.eval(freed)
        del freed
        assert memory.read().pool_bytes >= 48 * MIB
        held = mx.ones((72, MIB // 4))
        mx.eval(held)
        reading = memory.read()
        gave_way = reading.active_bytes + reading.pool_bytes <= reading.limit_bytes
        assert gave_way == memory.trims_own_pool
        del held
    finally:
        MlxMemory(MemorySettings(), current_device())


def test_process_footprint_includes_held_arrays():
    # An array that fits into the pool, or into the heap, takes nothing from the system.
    mx.clear_cache()
    heap.trim()
    process = SystemProcessMemory()
    before = process.footprint_bytes()
    array = mx.ones((16 * MIB,))
    mx.eval(array)
    assert process.footprint_bytes() - before >= 60 * MIB
    del array


# ---- bytes of a row ----------------------------------------------------------------------


def prefilled_engine(served: Served, chunk_tokens: int) -> tuple[EngineHarness, list[Any]]:
    """An engine in which one long prompt has just joined, and that row's layers."""
    engine = EngineHarness(*served, chunk_tokens=chunk_tokens)
    engine.add(ask("a", LONG, random_image(1), LONG))
    engine.step_until(lambda: bool(engine.tokens))
    return engine, engine.runner._groups._batch._cache


def test_row_bytes_are_predicted_before_allocation(served: Served):
    engine, _ = prefilled_engine(served, 512)
    engine.step()  # windows are cut back when a token follows the prompt
    layers = engine.runner._groups._batch._cache
    num_tokens = engine.prompts["a"].num_tokens
    held = sum(
        array.nbytes
        for layer in layers
        for each in getattr(layer, "caches", [layer])
        for array in vars(each).get("cache", vars(each).values())
        if isinstance(array, mx.array)
    )
    size = StateSize(layers, num_tokens)
    assert held <= size.bytes_for(num_tokens) <= 1.2 * held
    assert engine.runner.kv_bytes(num_tokens) == size.bytes_for(num_tokens)
    assert engine.runner.kv_bytes(10 * num_tokens) >= engine.runner.kv_bytes(num_tokens)
    engine.run()


def test_prompt_buffers_are_allocated_once(served: Served, monkeypatch: pytest.MonkeyPatch):
    sizes = set[int]()
    launch = Prefill.launch

    def watched(self: Prefill, *work: Any) -> mx.array:
        logits = launch(self, *work)
        found = [layer for layer in self.kv.cache if type(layer).__name__ == "KVCache"]
        sizes.update(layer.keys.shape[2] for layer in found)
        return logits

    monkeypatch.setattr(Prefill, "launch", watched)
    engine, layers = prefilled_engine(served, 48)
    assert len(sizes) <= 1
    assert sizes <= {buffer_capacity(engine.prompts["a"].num_tokens)}
    assert not any("step" in vars(layer) for layer in layers), "an answer grows by its own step"
    engine.run()


# ---- shortage ----------------------------------------------------------------------------

NO_MEMORY = "[malloc] Unable to allocate 123456789 bytes."


def failing(times: int = 1) -> Callable[..., Any]:
    """Fails as MLX does, so many times."""
    left = [times]

    def fail(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if left[0]:
                left[0] -= 1
                raise RuntimeError(NO_MEMORY)
            return real(*args, **kwargs)

        return call

    return fail


def patch(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, times: int = 1) -> None:
    monkeypatch.setattr(owner, name, failing(times)(getattr(owner, name)))


def returns_to(baseline: int) -> bool:
    """Whether active bytes are within 1 % of `baseline` two seconds after the last answer.

    MLX's own threads let go of a step's arrays a moment after its results are there.
    """
    deadline = time.monotonic() + 2.0
    while (found := active_bytes()) > 1.01 * baseline and time.monotonic() < deadline:
        time.sleep(0.01)
    return found <= 1.01 * baseline


@pytest.fixture
def decoding_engine(served: Served, monkeypatch: pytest.MonkeyPatch) -> tuple[EngineHarness, int]:
    """An engine that decodes one request, and what was held before it.

    It logs no tracebacks: pytest would keep them, and what their frames hold.
    """
    monkeypatch.setattr(model_runner.logger, "exception", lambda *_: None)
    engine = EngineHarness(*served)
    engine.answer(ask("warm", "hello", random_image(7)))
    baseline = active_bytes()
    engine.add(ask("other", "something", random_image(2)))
    engine.step_until(lambda: bool(engine.tokens.get("other")))
    return engine, baseline


WORK = pytest.mark.parametrize(
    ("owner", "name"),
    [(ImageEncoding, "_next_part"), (Prefill, "launch"), (DecodeBatch, "join")],
    ids=["encode", "prefill", "merge"],
)


@WORK
def test_out_of_memory_work_is_retried_once(
    decoding_engine: tuple[EngineHarness, int],
    monkeypatch: pytest.MonkeyPatch,
    alone_tokens: list[int],
    owner: Any,
    name: str,
):
    engine, baseline = decoding_engine
    engine.add(ask("a", "what?", random_image(1)))
    patch(monkeypatch, owner, name)
    engine.run()
    assert engine.tokens["a"] == alone_tokens
    assert returns_to(baseline)


@WORK
def test_request_out_of_memory_twice_fails_alone(
    decoding_engine: tuple[EngineHarness, int],
    monkeypatch: pytest.MonkeyPatch,
    alone_tokens: list[int],
    owner: Any,
    name: str,
):
    engine, baseline = decoding_engine
    patch(monkeypatch, owner, name, times=2)
    end = engine.failure(ask("a", "what?", random_image(1)))
    assert end.code == OutOfMemory.code
    assert isinstance(engine.ends["other"], Finished)
    assert returns_to(baseline)
    assert engine.answer(ask("again", "what?", random_image(1))) == alone_tokens


def test_decode_out_of_memory_ends_rows_and_admits_later_requests(
    decoding_engine: tuple[EngineHarness, int],
    monkeypatch: pytest.MonkeyPatch,
    alone_tokens: list[int],
):
    engine, baseline = decoding_engine
    patch(monkeypatch, DecodeBatch, "forward")
    engine.add(ask("a", "what?", random_image(1)))
    engine.run()
    other = engine.ends["other"]
    assert isinstance(other, Failed)
    assert other.code == OutOfMemory.code
    assert engine.tokens["a"] == alone_tokens
    assert returns_to(baseline)


@pytest.fixture
def alone_tokens(served: Served) -> list[int]:
    return EngineHarness(*served).answer(ask("a", "what?", random_image(1)))
