"""A chunk with snapshot points inside it keeps the states that chunks which end there have."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from tests.integration.harness import EngineHarness, Load, Served, ask, caches_of, conversation
from tests.integration.prompts import LONGER
from tests.integration.test_compiled_model import compiled, learn_step_times
from tests.support.images import random_image
from vlm_server.engine.scheduler.sizing import chunk_sizer
from vlm_server.runner.kv.segments import LayerStates
from vlm_server.runner.model.compiled_model import CompiledModel
from vlm_server.runner.prefill.prefill import Prefill

TURNS: list[tuple[str, tuple[Any, ...]]] = [
    ("system", ("You are a helpful assistant.",)),
    ("user", (random_image(1), "What is on the left?")),
    ("assistant", ("A circle.",)),
    ("user", (random_image(2), "And on the right?")),
]
Snapshots = dict[int, LayerStates]
ON_GPU = mx.cuda.is_available()
TOLERANCE = 0.03 if ON_GPU else 1e-4


def relative_distance(found: mx.array, wanted: mx.array) -> float:
    found, wanted = found.astype(mx.float32), wanted.astype(mx.float32)
    return float((mx.linalg.norm(found - wanted) / mx.linalg.norm(wanted)).item())


@pytest.fixture(params=["qwen3_5", "qwen3_5_moe", "lfm2_vl"])
def some_family(request: pytest.FixtureRequest, load_tiny: Load) -> Served:
    """Families whose layers have states, in a type that is compiled on the device."""
    loaded, preparer = load_tiny(request.param)
    if ON_GPU:
        loaded.language_model.set_dtype(mx.bfloat16)
    return loaded, preparer


@pytest.fixture
def snapshots(monkeypatch: pytest.MonkeyPatch) -> Snapshots:
    """Those of all prompts with a system message."""
    found: Snapshots = {}
    launch = Prefill.launch

    def recorded(self: Prefill, *arguments: Any) -> mx.array:
        logits = launch(self, *arguments)
        if self._prompt.snapshot_points:
            found.update(self.kv.snapshots)
        return logits

    monkeypatch.setattr(Prefill, "launch", recorded)
    return found


def answers_and_chunks(
    served: Served, kind: str, max_inner_points: int, snapshots: Snapshots
) -> tuple[list[list[int]], list[tuple[int, ...]], Snapshots]:
    """Answers to two turns, the points inside each chunk, and the snapshots."""
    snapshots.clear()
    inside = list[tuple[int, ...]]()
    caches = caches_of(served)
    engine, model = EngineHarness(*served, caches=caches, max_inner_points=max_inner_points), None
    if kind != "eager":
        engine, model = compiled(
            served,
            256 if kind == "mixed" else 0,
            caches=caches,
            max_inner_points=max_inner_points,
        )
        learn_step_times(engine)
        snapshots.clear()
    if kind == "mixed":
        engine.add(ask("beside", "Count to a hundred.", sampling=LONGER))
        engine.step(3)
    of_chunk = Prefill._chunk

    def recorded(self: Prefill, start: int, end: int) -> Any:
        chunk = of_chunk(self, start, end)
        inside.append(chunk.points)
        return chunk

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prefill, "_chunk", recorded)
        answers = []
        for number in (2, 4):
            submit = conversation(f"turn {number}", *TURNS[:number], sampling=LONGER)
            answers.append(engine.answer(submit))
    engine.run()
    assert engine.num_tracked == 0
    if model is not None:
        assert len(model.piggybacked if kind == "mixed" else model.chunks) >= 2
    return answers, inside, dict(snapshots)


@pytest.mark.parametrize("kind", ["eager", "compiled", "in parts", "mixed"])
def test_points_inside_chunks_keep_states_of_separate_chunks(
    some_family: Served, kind: str, snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(chunk_sizer, "_MAX_IDLE_CHUNK_SECONDS", 60.0)
    if kind == "in parts":
        supports = CompiledModel._supports_chunk
        monkeypatch.setattr(
            CompiledModel,
            "_supports_chunk",
            lambda self, chunk: not chunk.points and supports(self, chunk),
        )
    answers, inside, found = answers_and_chunks(some_family, kind, 2, snapshots)
    assert max(map(len, inside)) == 2
    wanted_answers, none_inside, wanted = answers_and_chunks(some_family, kind, 0, snapshots)
    assert not any(none_inside)
    assert ON_GPU or answers == wanted_answers
    assert sorted(found) == sorted(wanted)
    for point, states in found.items():
        for layer, wanted_layer in zip(states.arrays, wanted[point].arrays, strict=True):
            for array, other in zip(layer, wanted_layer, strict=True):
                assert array is not None
                assert other is not None
                assert relative_distance(array, other) < TOLERANCE, point
