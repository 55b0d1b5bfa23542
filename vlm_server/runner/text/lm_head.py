"""Computes a language model's logits of the last tokens alone.

mlx-vlm's families compute those of every token of a prompt: 622 MB in bfloat16 for 2,048 tokens and
a vocabulary of 152,000. Nobody here reads any but the last token's, or, where draft tokens are
verified, the last few. Of prompts that are padded to one length, it is one each, at its own place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn import (  # type: ignore[attr-defined]  # mlx.nn is not typed
    Embedding,
    Linear,
    QuantizedEmbedding,
    QuantizedLinear,
)
from numpy.typing import NDArray


class _OfLastToken:
    num_tokens = 1
    """How many of the last tokens get logits."""
    num_padding = 0
    """Positions after the last token, which are padding."""
    places: NDArray[np.int32] | None = None
    """(rows,): which token of each row gets logits, if they differ."""

    def _last(self, x: mx.array) -> mx.array:
        """Of (rows, tokens, hidden), the last tokens'."""
        if self.places is not None:
            return x[mx.arange(len(x)), mx.array(self.places)][:, None]
        end = x.shape[1] - self.num_padding
        return x[:, end - self.num_tokens : end]


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
    """Whether logits are those of one token, which `logits_of_last` chooses."""
    head, embeddings = _heads(language_model)
    return isinstance(embeddings if head is None else head, _OfLastToken)


@contextmanager
def logits_of_last(
    language_model: Any, num_tokens: int = 1, *, num_padding: int = 0
) -> Iterator[None]:
    """Logits are those of the last `num_tokens` before the input's last `num_padding` positions."""
    heads = [layer for layer in _heads(language_model) if isinstance(layer, _OfLastToken)]
    for head in heads:
        head.num_tokens, head.num_padding = num_tokens, num_padding
    try:
        yield
    finally:
        for head in heads:
            head.num_tokens, head.num_padding = 1, 0


@contextmanager
def logits_at(language_model: Any, places: Sequence[int]) -> Iterator[None]:
    """Logits are those of one token of each row, (rows, 1, vocabulary): see `_OfLastToken`."""
    heads = [layer for layer in _heads(language_model) if isinstance(layer, _OfLastToken)]
    for head in heads:
        head.places = np.array(places, dtype=np.int32)
    try:
        yield
    finally:
        for head in heads:
            head.places = None


def _heads(language_model: Any) -> tuple[Any, Any]:
    text = getattr(language_model, "model", None)
    head = getattr(language_model, "lm_head", None) or getattr(text, "lm_head", None)
    return head, getattr(text, "embed_tokens", None)
