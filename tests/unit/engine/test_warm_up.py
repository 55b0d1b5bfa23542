"""A model is warmed up at length once for its configuration, on one device."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

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
