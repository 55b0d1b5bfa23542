"""Checkpoints with 4-bit and 8-bit weights load, and keep what every family keeps."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from tests.integration.harness import Engine, ask, load_model, new_preparer
from tests.integration.prompts import PROMPTS
from tests.tiny_models import FAMILIES, GROUP_SIZE, build
from vlm_server.prompt.preparer import MultimodalPreparer
from vlm_server.runner.loaded import LoadedModel

pytestmark = pytest.mark.families("parts")

Served = tuple[LoadedModel, MultimodalPreparer]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[4, 8])
def bits(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def quantized(family: str, bits: int, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = build(family, tmp_path_factory.mktemp("quantized") / family, bits=bits)
    loaded = load_model(folder)
    return loaded, new_preparer(loaded)


def test_the_language_model_is_quantized(quantized: Served, bits: int):
    modules = dict(quantized[0].language_model.named_modules())
    layers = {name: module for name, module in modules.items() if "layers." in name}
    assert not [
        name
        for name, module in layers.items()
        if type(module) is nn.Linear and module.weight.shape[1] % GROUP_SIZE == 0
    ]
    found = {module.bits for module in layers.values() if hasattr(module, "bits")}
    assert bits in found
    assert found <= {bits, 8}, "routers of experts have 8 bits always"
    floating = {
        array.dtype
        for _, array in tree_flatten(quantized[0].model.parameters())
        if mx.issubdtype(array.dtype, mx.floating)
    }
    assert floating == {mx.float32}, "scales and biases are cast like weights on a CPU"


def test_batched_and_chunked_is_as_alone(quantized: Served):
    whole = {name: Engine(*quantized).answer(ask(name, *PROMPTS[name])) for name in PROMPTS}
    engine = Engine(*quantized, chunk_tokens=7)
    for name in PROMPTS:
        engine.add(ask(name, *PROMPTS[name]))
        engine.step(2)
    engine.run()
    assert engine.tokens == whole
    assert len(set(map(tuple, whole.values()))) == len(PROMPTS), "prompts matter"
