"""An examination before loading gives the figures that the engine has after loading."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.integration.harness import EngineHarness, ask, load_model
from tests.support.active_memory import active_bytes
from tests.tiny_models import FAMILIES, build
from tests.tiny_models.fixtures import TinyModel
from vlm_server.hub import layout
from vlm_server.hub.examination import ExaminationRequest
from vlm_server.hub.messages import DownloadPlan
from vlm_server.runner.loading.facts import examine
from vlm_server.runner.loading.held_arrays import arrays_of
from vlm_server.settings import MemorySettings, ModelSettings

pytestmark = pytest.mark.families()

GIB = 1 << 30


def plan_of(
    config: dict[str, Any], parameters: dict[str, int], weight_bytes: int = 0
) -> DownloadPlan:
    return DownloadPlan(
        "org/model", "a" * 40, config, (), parameters, weight_bytes, weight_bytes, 0
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_examination_figures_equal_engines(
    family: str, load_tiny: Callable[[str], Any], tiny_model: TinyModel
) -> None:
    found = examine(
        ExaminationRequest(ModelSettings(path=str(tiny_model(family))), MemorySettings(GIB)), 100
    )
    assert found.refusal == ""
    assert (found.family, found.is_checked) == (family, True)
    loaded, preparer = load_tiny(family)
    assert found.context_tokens == found.fitting_tokens == loaded.spec.context_tokens
    assert found.weight_bytes == pytest.approx(
        sum(array.nbytes for array in arrays_of(load_model(tiny_model(family)).model)), rel=0.02
    )
    engine = EngineHarness(loaded, preparer)
    engine.add(ask("first", "What is this?"))
    engine.run()
    assert found.kv_bytes == engine.runner.kv_bytes(found.context_tokens)
    assert found.least_kv_bytes == engine.runner.kv_bytes(min(100, found.context_tokens))


def test_examination_reads_no_weights(tmp_path: Path) -> None:
    folder = build("qwen3_vl", tmp_path)
    mx.reset_peak_memory()
    before = active_bytes()
    found = examine(ExaminationRequest(ModelSettings(path=str(folder)), MemorySettings(GIB)))
    assert mx.get_peak_memory() - before < found.weight_bytes / 2


def test_less_memory_fits_less_context(tmp_path: Path) -> None:
    folder = str(build("qwen3_vl", tmp_path))
    whole = examine(ExaminationRequest(ModelSettings(path=folder), MemorySettings(GIB)))
    assert whole.kv_bytes is not None
    limit = whole.weight_bytes + whole.kv_bytes // 2
    half = examine(ExaminationRequest(ModelSettings(path=folder), MemorySettings(limit)))
    assert half.fitting_tokens is not None
    assert half.kv_bytes is not None
    assert 0.4 * whole.context_tokens < half.fitting_tokens < 0.6 * whole.context_tokens
    assert half.weight_bytes + half.kv_bytes <= limit
    few = examine(
        ExaminationRequest(
            ModelSettings(path=folder, max_context_tokens=100), MemorySettings(limit)
        )
    )
    assert few.fitting_tokens == few.context_tokens == 100


def test_examination_refuses_oversized_model_with_figures(tmp_path: Path) -> None:
    folder = str(build("qwen3_vl", tmp_path))
    found = examine(ExaminationRequest(ModelSettings(path=folder), MemorySettings(100_000)))
    assert "the weights do not fit" in found.refusal
    assert found.family == "qwen3_vl"


def test_examination_of_hub_figures_equals_survey_of_files(tmp_path: Path) -> None:
    folder = build("qwen3_vl", tmp_path)
    here = examine(ExaminationRequest(ModelSettings(path=str(folder)), MemorySettings(GIB)))
    config = layout.read_object(folder / layout.CONFIG)
    model = ModelSettings()
    there = examine(
        ExaminationRequest(
            model, MemorySettings(GIB), plan_of(config, {"F32": here.weight_bytes // 4})
        )
    )
    assert there.refusal == ""
    assert there.weight_bytes == pytest.approx(here.weight_bytes, rel=0.01)
    assert there.fitting_tokens is None
    too_many = plan_of(config, {"BF16": 10**12})
    assert "do not fit" in examine(ExaminationRequest(model, MemorySettings(GIB), too_many)).refusal


def test_examination_without_hub_figures_uses_file_sizes() -> None:
    config = {"model_type": "qwen3_vl", "vision_config": {}, "torch_dtype": "bfloat16"}
    plan = plan_of(config, {}, 1000)
    found = examine(ExaminationRequest(ModelSettings(dtype="float32"), MemorySettings(GIB), plan))
    assert found.weight_bytes == 2000
    packed = plan_of(config | {"quantization": {"bits": 4}}, {}, 1000)
    found = examine(ExaminationRequest(ModelSettings(dtype="float32"), MemorySettings(GIB), packed))
    assert found.weight_bytes == 1000


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "no_such_family", "vision_config": {}}, "no family 'no_such_family'"),
        ({"vision_config": {}}, "names no model_type"),
        ({"model_type": "florence2", "vision_config": {}}, "encoder-decoder"),
    ],
)
def test_examination_refuses_unsupported_config_with_reason(
    config: dict[str, Any], words: str
) -> None:
    assert (
        words
        in examine(
            ExaminationRequest(ModelSettings(), MemorySettings(), plan_of(config, {}))
        ).refusal
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_checked_families_are_recognized_as_language_models(
    family: str, tiny_model: TinyModel
) -> None:
    folder = tiny_model(family)
    assert layout.is_language_model(json.loads((folder / "config.json").read_text()))
    assert layout.is_complete(folder)
