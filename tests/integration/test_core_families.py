"""The families that tests run for by default have every mechanism that any family has."""

from __future__ import annotations

import mlx.nn as nn
import pytest
from mlx_vlm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_vlm.models.switch_layers import SwitchGLU, SwitchLinear

from tests.integration.harness import load_model
from tests.support.mechanisms import ATOMIC, COLUMNS, EXPERTS, STATES, WINDOWS, mechanisms_of
from tests.support.selection import CORE, MIN_FAMILIES, choose, cover, rotating
from tests.tiny_models import FAMILIES
from tests.tiny_models.fixtures import TinyModel
from vlm_server.interfaces.model_spec import ChunkPolicy
from vlm_server.runner.kv.layers import needs_snapshots


@pytest.mark.parametrize("column", COLUMNS)
def test_core_families_cover_every_mechanism(column: str):
    """A family whose row has something new in a column becomes a core family."""
    for name in FAMILIES:
        missing = mechanisms_of(name, [column]) - {
            value for core in CORE for value in mechanisms_of(core, [column])
        }
        assert not missing, (
            f"{name} has {missing}, and no family of tests.support.selection.CORE has"
        )


def test_core_families_each_have_unique_mechanism():
    """Each has a mechanism that the others lack, so that the default run stays short."""
    for name in CORE:
        others = {value for core in CORE if core != name for value in mechanisms_of(core)}
        assert mechanisms_of(name) - others, f"{name} has nothing of its own"


def test_chosen_core_covers_mechanisms_of_all_families():
    for columns in (["rope", "caches"], ["tiling"], COLUMNS):
        wanted = {value for name in FAMILIES for value in mechanisms_of(name, columns)}
        found = {v for name in cover(FAMILIES, columns) for v in mechanisms_of(name, columns)}
        assert found == wanted


def test_test_without_columns_runs_for_two_families():
    assert len(choose(FAMILIES, [])) == MIN_FAMILIES


def test_test_list_of_families_keeps_its_mechanisms():
    assert choose(["pixtral", "llava"], None) >= {"pixtral", "llava"}, "none of them is core"
    assert choose(["qwen2_5_vl", "llava", "qwen3_vl_moe"], ["batches"]) >= {"qwen3_vl_moe"}


def test_rotation_reaches_all_families_outside_core():
    found = {rotating(f"{number:040x}") for number in range(1000)}
    assert found == set(FAMILIES) - set(CORE)


@pytest.mark.whole
@pytest.mark.parametrize("name", FAMILIES)
def test_mechanism_lists_match_loaded_models(name: str, tiny_model: TinyModel):
    """Mechanisms that the family table lacks are checked against loaded models."""
    loaded = load_model(tiny_model(name))
    language: nn.Module = loaded.language_model
    layers = make_prompt_cache(language)
    has_windows = any(isinstance(layer, RotatingKVCache) for layer in layers)
    assert has_windows == (name in WINDOWS)
    assert (needs_snapshots(language) and not has_windows) == (name in STATES)
    assert (loaded.spec.chunk_policy is not ChunkPolicy.ANYWHERE) == (name in ATOMIC)
    modules = [module for _, module in language.named_modules()]
    assert any(isinstance(m, (SwitchGLU, SwitchLinear)) for m in modules) == (name in EXPERTS)
