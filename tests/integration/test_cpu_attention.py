"""Prompts get the same answers by our own attention as by mlx-vlm's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from tests.integration.harness import EngineHarness, Served, caches_of
from tests.integration.prompts import answer_in_pairs
from vlm_server.runner.backends import cpu
from vlm_server.runner.backends.interface import Mask
from vlm_server.runner.model.attention import ModelAttention

pytestmark = pytest.mark.families("caches")

MASKED_THEMSELVES = frozenset({"glm5_next", "kimi_k25", "paddleocr_vl", "paligemma"})
"""Families that hand their attention a mask of their own, or none, or that have keys of their own
choice, so that it stays mlx-vlm's."""

MASKED_BLOCKS = frozenset({"llama4"})
"""Families that do so in chunks with tokens of several blocks, or of an image."""


class UnsupportingAttention(cpu.CpuAttention):
    """Leaves all to mlx-vlm."""

    def supports(self, queries: mx.array, keys: mx.array, mask: Mask) -> bool:
        return False


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The numbers of queries and keys that our own attention is called with from now on."""
    shapes = list[tuple[int, int]]()

    def watched(queries: mx.array, keys: mx.array, *rest: Any, **options: Any) -> mx.array:
        if options.get("is_causal"):  # a language model's, not a tower's
            shapes.append((queries.shape[2], keys.shape[2]))
        return own(queries, keys, *rest, **options)

    own = cpu.attention_on_cpu
    monkeypatch.setattr(cpu, "attention_on_cpu", watched)
    return shapes


def test_cpu_attention_answers_equal_mlx_vlms(
    served: Served, answered_in_pairs: list[list[int]], shapes: list[tuple[int, int]]
):
    loaded, preparer = served
    mlx_vlms = replace(
        loaded, attention=ModelAttention(loaded.language_model, UnsupportingAttention())
    )
    assert answer_in_pairs(EngineHarness(mlx_vlms, preparer)) == answered_in_pairs
    assert not shapes


@pytest.mark.parametrize(("chunk_tokens", "is_cached"), [(512, False), (21, False), (21, True)])
def test_cpu_attention_answers_are_equal_in_chunks(
    served: Served,
    answered_in_pairs: list[list[int]],
    shapes: list[tuple[int, int]],
    chunk_tokens: int,
    is_cached: bool,
):
    caches = {"caches": caches_of(served)} if is_cached else {}
    assert (
        answer_in_pairs(EngineHarness(*served, chunk_tokens=chunk_tokens, **caches))
        == answered_in_pairs
    )
    assert bool(shapes) == (served[0].family.name not in MASKED_THEMSELVES)
    if chunk_tokens < 30 and shapes and served[0].family.name not in MASKED_BLOCKS:
        assert any(queries < keys for queries, keys in shapes)
