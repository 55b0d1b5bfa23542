"""Metal's branches hold every invariant, for all core families.

On whatever device MLX has: a CPU, or a CUDA GPU without our kernels.
"""

from __future__ import annotations

import pytest

from tests.integration.harness import EngineHarness, Served, ask, caches_of, new_preparer
from tests.integration.prompts import LONGER, PROMPTS, prompt_request
from tests.support.integrity import check_integrity
from tests.support.selection import CORE
from tests.support.whole_run import few_of
from tests.tiny_models.fixtures import TinyModel
from vlm_server import settings
from vlm_server.engine.encoding import EncoderInTurns
from vlm_server.runner.backends.metal import MetalAttention
from vlm_server.runner.device.device import Device, DeviceKind
from vlm_server.runner.encode import encoder
from vlm_server.runner.encode.encoder import ImageEncoder
from vlm_server.runner.loading.load import load

pytestmark = pytest.mark.families("tiling")

METAL = Device(DeviceKind.METAL, "Apple M1 (stand-in)", 16 << 30, 9 << 30)


@pytest.fixture(params=CORE, scope="module")
def served(request: pytest.FixtureRequest, tiny_model: TinyModel) -> Served:
    folder = str(tiny_model(request.param))
    loaded = load(settings.ModelSettings(path=folder, dtype="float32"), METAL, METAL.memory_bytes)
    return loaded, new_preparer(loaded)


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "_TURN_SECONDS", 0.0)


def encode_in_turns(engine: EngineHarness) -> EngineHarness:
    """Make `engine` encode in turns, as where `Backend.encodes_in_turns`."""
    in_parts = ImageEncoder(engine.loaded, engine.caches.tiles)
    engine.loop.encoder = EncoderInTurns(in_parts, engine.inbox)
    return engine


@pytest.fixture(scope="module")
def answers_alone(served: Served) -> dict[str, list[int]]:
    return {name: EngineHarness(*served).answer(prompt_request(name, LONGER)) for name in PROMPTS}


def test_served_model_uses_metal_branches(served: Served):
    loaded = served[0]
    assert isinstance(loaded.attention.attention, MetalAttention)
    assert loaded.tiling is loaded.family.tiling
    assert loaded.errors.are_late


@pytest.mark.parametrize("chunk_tokens", few_of([512, 21], [21]))
@pytest.mark.parametrize("stagger", few_of([0, 3], [3]))
def test_metal_batched_and_chunked_answers_equal_answers_alone(
    served: Served, answers_alone: dict[str, list[int]], chunk_tokens: int, stagger: int
):
    engine = encode_in_turns(EngineHarness(*served, chunk_tokens=chunk_tokens))
    for name in PROMPTS:
        engine.add(prompt_request(name, LONGER))
        engine.step(stagger)
    engine.run()
    assert engine.tokens == answers_alone
    assert engine.num_tracked == 0


def test_metal_cached_answers_equal_uncached_answers(
    served: Served, answers_alone: dict[str, list[int]]
):
    engine = encode_in_turns(EngineHarness(*served, caches=caches_of(served)))
    for name in PROMPTS:
        assert engine.answer(prompt_request(name, LONGER)) == answers_alone[name]
    for name in PROMPTS:
        again = ask(f"{name} again", *PROMPTS[name], sampling=LONGER)
        assert engine.answer(again) == answers_alone[name]
    check_integrity(engine.caches)
    assert engine.caches.num_references == 0


def test_metal_drafts_change_no_answer(served: Served, answers_alone: dict[str, list[int]]):
    engine = encode_in_turns(EngineHarness(*served, num_draft_tokens=7))
    for name in PROMPTS:
        engine.add(prompt_request(name, LONGER))
    engine.run()
    assert engine.tokens == answers_alone
