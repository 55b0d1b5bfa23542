"""How many sequences decode together follows from the memory that a model leaves."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest

from tests.integration.harness import GREEDY, EngineHarness, ask, load_model
from tests.integration.prompts import PROMPTS
from tests.integration.threaded_engine import ThreadedEngine
from tests.support.images import random_image
from tests.tiny_models.fixtures import TinyModel
from vlm_server import settings
from vlm_server.prompt.preparer import MultimodalPreparer
from vlm_server.protocol import Finished, SamplingParams, Start, Stats
from vlm_server.runner.families.table import FAMILIES
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.loading.probe import planned_state_size
from vlm_server.runner.memory import MlxMemory

pytestmark = pytest.mark.families("caches")


def test_planned_sequence_bytes_match_use_and_change_no_answer(
    served: tuple[LoadedModel, MultimodalPreparer],
) -> None:
    loaded, preparer = served
    before = EngineHarness(loaded, preparer)
    tokens = before.answer(ask("a", "what?", random_image(1)))
    planned = planned_state_size(loaded.language_model)
    assert [planned.bytes_for(count) for count in (1, 100, 5000)] == [
        before.runner.kv_bytes(count) for count in (1, 100, 5000)
    ]
    assert EngineHarness(loaded, preparer).answer(ask("a", "what?", random_image(1))) == tokens


def start_with_limit(limit_bytes: int, **scheduler: int) -> Start:
    return Start(
        settings.ModelSettings(),
        settings.SchedulerSettings(**scheduler),  # type: ignore[arg-type]
        settings.EngineSettings(),
        settings.Log(),
        settings.MemorySettings(max_bytes=limit_bytes),
    )


def reported_max_num_seqs(engine: ThreadedEngine) -> int:
    """The `max_num_seqs` of the last statistics."""
    return next(e for e in reversed(engine.events) if isinstance(e, Stats)).max_num_seqs


@pytest.fixture
def loaded(load_tiny: Callable[[str], tuple[LoadedModel, MultimodalPreparer]]) -> LoadedModel:
    return load_tiny("qwen3_vl")[0]


@pytest.mark.parametrize(("wanted", "together"), [(20, 16), (100, 24)])
def test_automatic_max_num_seqs_follows_memory_and_is_reported(
    loaded: LoadedModel, wanted: int, together: int
) -> None:
    """The choices of a request decode together: of three with eight each all, or those of two."""
    one = planned_state_size(loaded.language_model)
    seq_bytes = one.bytes_for(min(4096, loaded.spec.context_tokens))
    free = 2 * wanted * seq_bytes + seq_bytes
    eight = SamplingParams(n=8, max_tokens=40, temperature=1.0, seed=1)
    try:
        engine = ThreadedEngine(loaded, start_with_limit(mx.get_active_memory() + free))
        for name in "abc":
            engine.inbox.put(ask(name, "what?", sampling=eight))
        most = 0
        while len(engine.ends) < 3:
            most = max(most, len(engine.loop.step().decode))
        engine.loop.run_until_idle()
    finally:
        MlxMemory(settings.MemorySettings(), loaded.device)
    assert reported_max_num_seqs(engine) == pytest.approx(wanted, abs=1)
    assert all(isinstance(end, Finished) for end in engine.ends.values())
    assert most == together


def test_sequences_with_unbatchable_caches_decode_alone(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 4 as mlx-vlm has it."""
    monkeypatch.delitem(FAMILIES, "llama4")
    loaded = load_model(tiny_model("llama4"), allow_unchecked=True)
    assert loaded.spec.warnings == (
        "mlx-vlm's caches of this family can't be batched: one request runs at a time",
    )
    names, sampling = ("text", "long", "image"), SamplingParams(max_tokens=8, temperature=0.0)
    engine = ThreadedEngine(loaded, start_with_limit(2 << 30, prefill_chunk_tokens=16))
    for name in names:
        engine.inbox.put(ask(name, *PROMPTS[name], sampling=sampling))
    most = 0
    while len(engine.ends) < len(names):
        most = max(most, len(engine.loop.step().decode))
    engine.loop.run_until_idle()
    assert most == reported_max_num_seqs(engine) == 1
    assert all(isinstance(end, Finished) for end in engine.ends.values())


def test_explicit_max_num_seqs_is_kept(loaded: LoadedModel) -> None:
    engine = ThreadedEngine(loaded, start_with_limit(0, max_num_seqs=3))
    engine.inbox.put(ask("a", "what?", sampling=GREEDY))
    engine.loop.run_until_idle()
    assert reported_max_num_seqs(engine) == 3
