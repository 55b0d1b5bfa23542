"""A model is warmed up at length once for its configuration, on one device."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.unit.engine.driver import SteppedEngine
from vlm_server.engine import loop
from vlm_server.engine.warm_up import WarmUpRecord
from vlm_server.settings import ModelSettings


@pytest.fixture(autouse=True)
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def checkpoint(folder: Path, config: str) -> ModelSettings:
    folder.mkdir()
    (folder / "config.json").write_text(config)
    return ModelSettings(path=str(folder))


def test_warm_up_record_is_kept_per_configuration_and_device(tmp_path: Path):
    model = checkpoint(tmp_path / "one", "{}")
    record = WarmUpRecord(model, "cpu")
    assert not record.exists()
    record.write()
    assert WarmUpRecord(model, "cpu").exists()
    assert WarmUpRecord(checkpoint(tmp_path / "copy", "{}"), "cpu").exists()
    assert not WarmUpRecord(model, "NVIDIA H100").exists()
    assert not WarmUpRecord(checkpoint(tmp_path / "other", '{"bits": 4}'), "cpu").exists()


def test_unwritable_warm_up_record_stops_no_start(tmp_path: Path, kernels: Path):
    kernels.write_text("no folder")
    record = WarmUpRecord(checkpoint(tmp_path / "one", "{}"), "cpu")
    record.write()
    assert not record.exists()


# ---- compilation ---------------------------------------------------------------------


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
