"""A model's last layer for the last token alone. Knows where mlx-vlm's families keep it.

They make logits of every token of a prompt, which for 2,048 tokens and a vocabulary of 152,000
are 622 MB in bfloat16. Nobody here reads those before the last.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn import (  # type: ignore[attr-defined]  # mlx.nn is not typed
    Embedding,
    Linear,
    QuantizedEmbedding,
    QuantizedLinear,
)


class _LastLinear(Linear):  # type: ignore[misc]
    def __call__(self, x: mx.array) -> Any:
        return super().__call__(_last(x))


class _LastQuantizedLinear(QuantizedLinear):  # type: ignore[misc]
    def __call__(self, x: mx.array) -> Any:
        return super().__call__(_last(x))


class _LastEmbedding(Embedding):  # type: ignore[misc]
    def as_linear(self, x: mx.array) -> Any:
        return super().as_linear(_last(x))


class _LastQuantizedEmbedding(QuantizedEmbedding):  # type: ignore[misc]
    def as_linear(self, x: mx.array) -> Any:
        return super().as_linear(_last(x))


_LAST: dict[type, type] = {
    Linear: _LastLinear,
    QuantizedLinear: _LastQuantizedLinear,
    Embedding: _LastEmbedding,
    QuantizedEmbedding: _LastQuantizedEmbedding,
}


def use_last_token_head(language_model: Any) -> None:
    """Let a loaded model's logits be (rows, 1, vocabulary), whatever the length of its input.

    The head is a layer of its own, or the embeddings read backwards. One that is not exactly
    of a known class stays.
    """
    text = getattr(language_model, "model", None)
    for layer in (getattr(language_model, "lm_head", None), getattr(text, "embed_tokens", None)):
        if type(layer) in _LAST:
            layer.__class__ = _LAST[type(layer)]


def _last(x: mx.array) -> mx.array:
    """Of (rows, tokens, hidden), the last token's."""
    return x[:, -1:]
