"""Our CUDA attention gives mlx-vlm's answers with any set of planned shapes."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from tests.integration.harness import EngineHarness, Served, caches_of
from tests.integration.prompts import answer_in_pairs
from vlm_server.runner.backends.cuda import attention as cuda_attention
from vlm_server.runner.backends.cuda.attention import CudaAttention
from vlm_server.runner.device.device import DeviceKind
from vlm_server.runner.model.attention import ModelAttention

pytestmark = pytest.mark.families("rope")


@pytest.fixture
def as_on_cuda(served: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    """A model in float32 with small blocks."""
    monkeypatch.setattr(cuda_attention.CudaBackend, "prefill_padding_tokens", 16)
    monkeypatch.setattr(cuda_attention, "BLOCK_TOKENS", 16)
    monkeypatch.setattr(cuda_attention, "_DTYPES", (mx.float32,))
    monkeypatch.setattr(cuda_attention, "_is_correct", lambda heads: True)
    loaded, preparer = served
    attention = ModelAttention(loaded.language_model, CudaAttention(256))
    cuda = replace(loaded.device, kind=DeviceKind.CUDA)
    return replace(loaded, device=cuda, attention=attention), preparer


@pytest.mark.parametrize("chunk_tokens", [512, 21])
def test_cuda_attention_answers_equal_mlx_vlms_before_and_after_planning(
    answered_in_pairs: list[list[int]], as_on_cuda: Served, chunk_tokens: int
):
    """First unplanned, then in blocks, then with all seen shapes planned."""
    cached = caches_of(as_on_cuda)
    for caches in (cached, cached, caches_of(as_on_cuda)):
        engine = EngineHarness(*as_on_cuda, chunk_tokens=chunk_tokens, caches=caches)
        assert answer_in_pairs(engine) == answered_in_pairs
        while engine.runner.precompile_next():
            pass
