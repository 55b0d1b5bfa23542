"""The runner precompiles while the engine is idle, after a pause in which a follow-up may come."""

from __future__ import annotations

import pytest

from tests.unit.engine.driver import SteppedEngine
from vlm_server.engine import loop


def test_idle_engine_precompiles_all_shapes():
    engine = SteppedEngine()
    engine.runner.shapes_left = 3
    engine.loop.step()
    assert engine.runner.shapes_left == -1
    assert engine.loop._precompile_due is None


def test_precompilation_pauses_right_after_answer(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr(loop.time, "monotonic", lambda: now)
    engine = SteppedEngine()
    engine.add("a")
    engine.run()
    engine.runner.shapes_left = 2
    engine.loop.step()
    now += loop._PRECOMPILE_AFTER_SECONDS / 2
    engine.loop.step()
    assert engine.runner.shapes_left == 2
    seconds = engine.loop._seconds_to_wait()
    assert seconds is not None
    assert 0 < seconds <= loop._PRECOMPILE_AFTER_SECONDS / 2
    now += seconds
    engine.loop.step()
    assert engine.runner.shapes_left == -1


def test_precompilation_resumes_after_every_request(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loop, "_PRECOMPILE_AFTER_SECONDS", 0.0)
    engine = SteppedEngine()
    for name in ("a", "b"):
        engine.runner.shapes_left = 1
        engine.add(name)
        engine.run()
        engine.loop.step()
        assert engine.runner.shapes_left == -1
