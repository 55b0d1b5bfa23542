"""Computes a language model's logits of the last token alone.

mlx-vlm's families compute those of every token of a prompt: 622 MB in bfloat16 for 2,048 tokens and
a vocabulary of 152,000. Nobody here reads any but the last token's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn import (  # type: ignore[attr-defined]  # mlx.nn is not typed
    Embedding,
    Linear,
    QuantizedEmbedding,
    QuantizedLinear,
)


class _OfLastToken:
    num_padding = 0
    """Positions after the last token, which are padding."""

    def _last(self, x: mx.array) -> mx.array:
        """Of (rows, tokens, hidden), the last token's."""
        end = x.shape[1] - self.num_padding
        return x[:, end - 1 : end]


class _LastLinear(_OfLastToken, Linear):  # type: ignore[misc]
    def __call__(self, x: mx.array) -> Any:
        return super().__call__(self._last(x))


class _LastQuantizedLinear(_OfLastToken, QuantizedLinear):  # type: ignore[misc]
    def __call__(self, x: mx.array) -> Any:
        return super().__call__(self._last(x))


class _LastEmbedding(_OfLastToken, Embedding):  # type: ignore[misc]
    def as_linear(self, x: mx.array) -> Any:
        return super().as_linear(self._last(x))


class _LastQuantizedEmbedding(_OfLastToken, QuantizedEmbedding):  # type: ignore[misc]
    def as_linear(self, x: mx.array) -> Any:
        return super().as_linear(self._last(x))


_LAST: dict[type, type] = {
    Linear: _LastLinear,
    QuantizedLinear: _LastQuantizedLinear,
    Embedding: _LastEmbedding,
    QuantizedEmbedding: _LastQuantizedEmbedding,
}


def use_last_token_head(language_model: Any) -> None:
    """Let a loaded model's logits be (rows, 1, vocabulary), whatever the length of its input.

    The head is a layer of its own, or the transposed embeddings. One that is not exactly of a
    known class stays.
    """
    for layer in _heads(language_model):
        if type(layer) in _LAST:
            layer.__class__ = _LAST[type(layer)]


def has_last_token_head(language_model: Any) -> bool:
    """Whether logits are those of one token, which `last_token_before` chooses."""
    head, embeddings = _heads(language_model)
    return isinstance(embeddings if head is None else head, _OfLastToken)


@contextmanager
def last_token_before(language_model: Any, num_padding: int) -> Iterator[None]:
    """Logits are those of the token before the input's last `num_padding` positions."""
    heads = [layer for layer in _heads(language_model) if isinstance(layer, _OfLastToken)]
    for head in heads:
        head.num_padding = num_padding
    try:
        yield
    finally:
        for head in heads:
            head.num_padding = 0


def _heads(language_model: Any) -> tuple[Any, Any]:
    text = getattr(language_model, "model", None)
    head = getattr(language_model, "lm_head", None) or getattr(text, "lm_head", None)
    return head, getattr(text, "embed_tokens", None)
