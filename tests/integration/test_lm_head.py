"""Logits are computed for the last token alone, and equal mlx-vlm's."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest

from vlm_server.prompt.preparer import MultimodalPreparer
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.model.lm_head import use_last_token_head

pytestmark = pytest.mark.families()

FAMILIES = ("qwen2_5_vl", "qwen3_5", "gemma3", "idefics3", "mistral3", "internvl", "glm4v", "llava")


def logits_of(loaded: LoadedModel, token_ids: list[int]) -> mx.array:
    loaded.forget_positions()
    return loaded.language_model(mx.array([token_ids])).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_last_token_logits_equal_mlx_vlms(
    load_tiny: Callable[[str], tuple[LoadedModel, MultimodalPreparer]],
    load_mlx_vlms: Callable[[str], LoadedModel],
    family: str,
):
    token_ids = [5, 6, 7, 8, 9]
    ours = logits_of(load_tiny(family)[0], token_ids)
    own = logits_of(load_mlx_vlms(family), token_ids)
    assert ours.shape == (1, 1, own.shape[-1])
    assert own.shape[1] == len(token_ids)
    assert mx.abs(ours - own[:, -1:]).max().item() < 1e-5


class _Text:
    def __init__(self, embeddings: nn.Module) -> None:
        self.embed_tokens = embeddings


class _Model:
    def __init__(self, head: nn.Module, embeddings: nn.Module) -> None:
        self.lm_head = head
        self.model = _Text(embeddings)


def test_quantized_lm_head_computes_only_last_token():
    x = mx.random.normal((2, 3, 64))
    head, embeddings = nn.Linear(64, 32).to_quantized(32, 4), nn.Embedding(32, 64).to_quantized(32)
    expected = head(x)[:, -1:], embeddings.as_linear(x)[:, -1:]
    use_last_token_head(_Model(head, embeddings))
    assert mx.allclose(head(x), expected[0])
    assert mx.allclose(embeddings.as_linear(x), expected[1])
    assert embeddings(mx.array([1, 2, 3])).shape == (3, 64)


def test_custom_lm_head_class_is_not_replaced():
    class Head(nn.Linear):
        pass

    head = Head(4, 4)
    use_last_token_head(_Model(head, nn.Embedding(4, 4)))
    assert type(head) is Head
