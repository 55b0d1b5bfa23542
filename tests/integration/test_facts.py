"""Model facts are counted, not copied from the configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.harness import load_model
from tests.tiny_models import build
from tests.tiny_models.fixtures import TinyModel
from vlm_server.interfaces.model_spec import ReasoningFormat
from vlm_server.runner.loading.facts import model_facts


def test_quantized_model_reports_equal_parameters_in_fewer_bytes(
    tiny_model: TinyModel, tmp_path: Path
):
    folder = tiny_model("qwen2_5_vl")
    whole = model_facts(load_model(folder), folder)
    small_folder = build("qwen2_5_vl", tmp_path / "small", bits=4)
    small = model_facts(load_model(small_folder), small_folder)
    assert whole.num_parameters == small.num_parameters > 0
    assert whole.size_bytes == pytest.approx(4 * whole.num_parameters, rel=0.01)
    assert small.size_bytes < 0.6 * whole.size_bytes
    assert (whole.quantization, small.quantization) == ("float32", "4bit")
    assert whole.digest != small.digest
    files = [*folder.glob("*.safetensors"), folder / "config.json"]
    assert whole.modified_at == max(path.stat().st_mtime for path in files)


def test_model_facts_report_image_rule_and_capabilities(tiny_model: TinyModel):
    folder = tiny_model("qwen2_5_vl")
    loaded = load_model(folder)
    facts = model_facts(loaded, folder)
    assert facts.family == "qwen2_5_vl"
    assert facts.context_tokens == loaded.spec.context_tokens
    assert (facts.min_image_pixels, facts.max_image_pixels) == (3136, 1_003_520)
    assert facts.image_side_multiple == 28
    bare = replace(loaded, spec=replace(loaded.spec, tool_parser=None, reasoning_format=None))
    assert not {"tools", "thinking"} & set(model_facts(bare, folder).capabilities)
    thinking = replace(loaded.spec, reasoning_format=ReasoningFormat("<think>", "</think>"))
    assert "thinking" in model_facts(replace(loaded, spec=thinking), folder).capabilities


def test_model_facts_of_fixed_size_family_have_no_image_rule(tiny_model: TinyModel):
    folder = tiny_model("gemma3")
    assert model_facts(load_model(folder), folder).image_side_multiple == 0
