"""Computes a language model's logits of the last tokens alone.

mlx-vlm's families compute logits of every token of a prompt: 622 MB in bfloat16 for 2,048 tokens
and a vocabulary of 152,000. Needed are only those of the last token, of the last few where drafts
are verified, or of one token of each row in a batched prefill.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn import (  # type: ignore[attr-defined]  # mlx.nn is not typed
    Embedding,
    Linear,
    QuantizedEmbedding,
    QuantizedLinear,
)

from vlm_server.errors import ModelLoadError
from vlm_server.runner.backends.interface import RowsLayer
from vlm_server.runner.model.hidden_states import HiddenStates, kept_layers


@dataclass(frozen=True, slots=True)
class WantedLogits:
    """The tokens that get logits: the last `num_tokens` before `num_padding`, or those at `places`.

    places: (rows,) int32, one token of each row. rows: int32, the rows with logits; None for all.
    """

    num_tokens: int = 1
    num_padding: int = 0
    places: mx.array | None = None
    rows: mx.array | None = None


class _OfLastToken:
    wanted = WantedLogits()
    seen: HiddenStates | None = None
    """What gets the hidden states of the present step."""

    def _last(self, x: mx.array) -> mx.array:
        """The hidden states of the wanted tokens, of (rows, tokens, hidden)."""
        wanted = self.wanted
        if self.seen is not None:
            self.seen.of_head = x
        if wanted.places is not None:
            return x[mx.arange(len(x)), wanted.places][:, None]
        if wanted.rows is not None:
            x = x[wanted.rows]
        end = x.shape[1] - wanted.num_padding
        return x[:, end - wanted.num_tokens : end]


def _of_last_token(layer: Any) -> type:
    """A subclass of a layer that multiplies the wanted tokens alone."""
    name = "as_linear" if hasattr(layer, "as_linear") else "__call__"
    multiply = getattr(layer, name)

    def multiply_last(self: Any, x: mx.array) -> Any:
        return multiply(self, self._last(x))

    return type(f"Last{layer.__name__}", (_OfLastToken, layer), {name: multiply_last})


def _is_known(layer: type) -> bool:
    is_mlxs = layer in (Linear, QuantizedLinear, Embedding, QuantizedEmbedding)
    return is_mlxs or (issubclass(layer, RowsLayer) and not issubclass(layer, _OfLastToken))


def use_last_token_head(language_model: Any) -> None:
    """Let a loaded model's logits be (rows, 1, vocabulary), whatever the length of its input.

    The head is a layer of its own, or the transposed embeddings. One that is not exactly of a
    known class stays.
    """
    for layer in _heads(language_model):
        if _is_known(type(layer)):
            layer.__class__ = _of_last_token(type(layer))


def has_last_token_head(language_model: Any) -> bool:
    """Whether logits are computed only for the tokens that `logits_of` chooses."""
    head, embeddings = _heads(language_model)
    return isinstance(embeddings if head is None else head, _OfLastToken)


@contextmanager
def logits_of(language_model: Any, wanted: WantedLogits) -> Iterator[HiddenStates]:
    """Let logits be those of the wanted tokens, (rows, tokens, vocabulary).

    What it yields gets the hidden states of the step.
    """
    heads = [layer for layer in _heads(language_model) if isinstance(layer, _OfLastToken)]
    layers, hidden_states = kept_layers(language_model), HiddenStates()
    for head in heads:
        head.wanted, head.seen = wanted, hidden_states
    for layer in layers:
        layer.seen = hidden_states
    try:
        yield hidden_states
    finally:
        for head in heads:
            head.wanted, head.seen = WantedLogits(), None
        for layer in layers:
            layer.seen = None


def embedding_shape(language_model: Any) -> tuple[int, int]:
    """The sizes of vocabulary and hidden states, by a lazy embedding. Raises ModelLoadError."""
    embeddings = _heads(language_model)[1]
    if not hasattr(embeddings, "weight"):
        raise ModelLoadError("no drafter fits this model: its embeddings are not in one table")
    return len(embeddings.weight), embeddings(mx.zeros((1, 1), mx.int32)).shape[-1]


def embed(language_model: Any, token_ids: mx.array) -> mx.array:
    """The embeddings of `token_ids`, (rows, tokens): (rows, tokens, hidden)."""
    return _heads(language_model)[1](token_ids)  # type: ignore[no-any-return]


def likeliest(language_model: Any, hidden: mx.array) -> mx.array:
    """The likeliest tokens, (rows, 1), after hidden states, (rows, 1, hidden)."""
    head, embeddings = _heads(language_model)
    logits = embeddings.as_linear(hidden) if head is None else head(hidden)
    return mx.argmax(logits, axis=-1)


_TEXTS = ("model", "transformer", "backbone")
_HEADS = ("lm_head", "output", "embed_out")
_EMBEDDINGS = ("embed_tokens", "embeddings", "wte", "tok_embeddings", "word_embeddings")


def _heads(language_model: Any) -> tuple[Any, Any]:
    text = _first(language_model, _TEXTS)
    head = _first(language_model, _HEADS) or _first(text, _HEADS)
    return head, _first(text, _EMBEDDINGS)


def _first(module: Any, names: Sequence[str]) -> Any:
    """The first of `names` that `module` has; None without one."""
    return next(filter(None, (getattr(module, name, None) for name in names)), None)
