"""InternVL over Qwen2, which mlx-vlm has only over Qwen3, answers as its parts do in mlx-vlm."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx_vlm
import pytest

from tests.integration.harness import EngineHarness, Served, load_model, new_preparer
from tests.integration.prompts import LONGER, PROMPTS, prompt_request
from tests.integration.test_families import mlx_vlm_tokens
from tests.tiny_models import build, cached
from vlm_server.runner.loading.checkpoint.view import text_model_of


@pytest.fixture(scope="module")
def folder() -> Path:
    return cached("internvl", "over qwen2")


@pytest.fixture(scope="module")
def served(folder: Path) -> Served:
    loaded = load_model(folder)
    return loaded, new_preparer(loaded)


@pytest.fixture(scope="module")
def alone(served: Served) -> dict[str, list[int]]:
    engine = EngineHarness(*served)
    return {name: engine.answer(prompt_request(name, LONGER)) for name in PROMPTS}


def test_tokens_over_qwen2_equal_mlx_vlms(
    folder: Path, served: Served, alone: dict[str, list[int]]
):
    with text_model_of(json.loads((folder / "config.json").read_text())):
        model, processor = mlx_vlm.load(str(folder))
    model.set_dtype(mx.float32)
    assert model.language_model.model_type == "qwen2"
    reference = replace(served[0], model=model, processor=processor)
    for name, parts in PROMPTS.items():
        assert alone[name] == mlx_vlm_tokens(reference, ("user", parts)), name


@pytest.mark.parametrize("chunk", [7, 512])
def test_batched_tokens_over_qwen2_equal_those_alone(
    served: Served, alone: dict[str, list[int]], chunk: int
):
    engine = EngineHarness(*served, chunk_tokens=chunk)
    for name in PROMPTS:
        engine.add(prompt_request(name, LONGER))
    engine.run()
    assert engine.tokens == alone


def test_dynamic_scaling_changes_nothing_within_context(
    tmp_path: Path, alone: dict[str, list[int]]
):
    """As InternVL 3 over Qwen2 is published."""
    folder = build("internvl", tmp_path, shape="over qwen2")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["rope_scaling"] = {"factor": 2.0, "rope_type": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load_model(folder)
    engine = EngineHarness(loaded, new_preparer(loaded))
    assert engine.answer(prompt_request("image", LONGER)) == alone["image"]


def test_next_checkpoint_over_qwen3_has_qwen3():
    loaded = load_model(cached("internvl"))
    assert loaded.language_model.model_type == "qwen3"
