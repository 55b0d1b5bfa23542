"""Checkpoints with 4-bit and 8-bit weights load, and keep what every family keeps."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from tests.integration.harness import EngineHarness, Served, ask, load_model, new_preparer
from tests.integration.prompts import PROMPTS
from tests.tiny_models import FAMILIES, build
from vlm_server.runner.backends.dequantize import DequantizingLinear

pytestmark = pytest.mark.families("parts")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[(4, False), (8, False), (4, True)], ids=str)
def quantized(
    request: pytest.FixtureRequest, family: str, tmp_path_factory: pytest.TempPathFactory
) -> Served:
    """A model of 4 or 8 bits, and whether there is memory to dequantize it."""
    bits, is_dense = request.param
    folder = build(family, tmp_path_factory.mktemp("quantized") / family, bits=bits)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    loaded = load_model(folder, None if is_dense else size + size // 8)
    kinds = {type(module) for module in loaded.language_model.modules()}
    assert (DequantizingLinear in kinds) is not is_dense
    assert loaded.parameters[f"{bits}bit"] > 0
    floating = {
        array.dtype
        for _, array in tree_flatten(loaded.model.parameters())
        if mx.issubdtype(array.dtype, mx.floating)
    }
    assert floating == {mx.float32}, "scales and biases are cast like weights on a CPU"
    return loaded, new_preparer(loaded)


def test_quantized_batched_and_chunked_answers_equal_answers_alone(quantized: Served):
    whole = {name: EngineHarness(*quantized).answer(ask(name, *PROMPTS[name])) for name in PROMPTS}
    engine = EngineHarness(*quantized, chunk_tokens=7)
    for name in PROMPTS:
        engine.add(ask(name, *PROMPTS[name]))
        engine.step(2)
    engine.run()
    assert engine.tokens == whole
    assert len(set(map(tuple, whole.values()))) == len(PROMPTS), "prompts matter"
