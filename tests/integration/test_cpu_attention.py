"""Prompts get the same answers by our own attention as by mlx-vlm's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from tests.integration.harness import Engine
from tests.integration.test_caches import caches_of
from tests.integration.test_padded_chunks import Served, answers
from vlm_server.runner.text import attention
from vlm_server.runner.text.attention import ModelAttention

MASKED_THEMSELVES = frozenset({"paddleocr_vl"})
"""Families that hand their attention a mask of their own, so that it stays mlx-vlm's."""


@pytest.mark.parametrize(("chunk_tokens", "is_cached"), [(512, False), (21, False), (21, True)])
def test_answers_are_the_same(
    served: Served, monkeypatch: pytest.MonkeyPatch, chunk_tokens: int, is_cached: bool
):
    loaded, preparer = served
    shapes = list[tuple[int, int]]()

    def watched(queries: mx.array, keys: mx.array, *rest: Any, **options: Any) -> mx.array:
        shapes.append((queries.shape[2], keys.shape[2]))
        return own(queries, keys, *rest, **options)

    own = attention.attention_on_cpu
    monkeypatch.setattr(attention, "attention_on_cpu", watched)

    def answered(served: Served) -> list[list[int]]:
        caches = {"caches": caches_of(served)} if is_cached else {}
        return answers(Engine(*served, chunk_tokens=chunk_tokens, **caches))

    mlx_vlms = ModelAttention(loaded.language_model, None)
    expected = answered((replace(loaded, attention=mlx_vlms), preparer))
    assert not shapes
    assert answered((loaded, preparer)) == expected
    assert bool(shapes) == (loaded.family.name not in MASKED_THEMSELVES)
    if chunk_tokens < 30 and shapes:
        assert any(queries < keys for queries, keys in shapes)
