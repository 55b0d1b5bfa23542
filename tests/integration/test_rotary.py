"""One kernel for a step's positions gives the tokens that mlx-vlm's own rotary gives."""

from __future__ import annotations

import mlx_vlm
import pytest

from tests.integration.harness import Engine, ask
from tests.tiny_models.fixtures import TinyModel
from tests.tiny_models.pictures import picture
from vlm_server.runner.loading import load
from vlm_server.runner.preparer import MultimodalPreparer
from vlm_server.runner.rotary import has_fast_rotary, use_fast_rotary
from vlm_server.settings import Model


def answers(model: Model, *, fast: bool) -> dict[str, list[int]]:
    """The tokens of two prompts of text and two of pictures, which decode together."""
    loaded = load(model)
    if fast:
        assert use_fast_rotary(loaded.language_model)
    assert has_fast_rotary(loaded.language_model) == fast
    engine = Engine(loaded, MultimodalPreparer(loaded))
    engine.add(ask("short", "Hello"))
    engine.step(3)
    engine.add(ask("picture", picture(1), "What is this?"))
    engine.add(ask("long", "a b c d e f g h " * 9))
    engine.add(ask("other picture", "And this?", picture(2, 90, 60)))
    engine.run()
    return engine.tokens


@pytest.mark.parametrize(
    "family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"]
)
def test_tokens_are_the_same(tiny_model: TinyModel, family: str):
    model = Model(path=str(tiny_model(family)))
    assert answers(model, fast=True) == answers(model, fast=False)


def test_other_families_keep_their_own(tiny_model: TinyModel):
    model, _ = mlx_vlm.load(str(tiny_model("gemma3")))
    assert not use_fast_rotary(model.language_model)
    assert not has_fast_rotary(model.language_model)
