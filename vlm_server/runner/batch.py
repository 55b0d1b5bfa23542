"""All rows that decode together. Knows the batched KV cache; knows no request's text or end.

Runs one step ahead of what it reports: `step` launches a step on the tokens that the last
one drew, and only then reads those tokens, so the device works while the host reads them.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_server.runner.prefill import Prefill
from vlm_server.runner.sampler import RowSampler, sample


@dataclass(slots=True)
class _Row:
    """`position` is that of the row's next token, before the family's rotary delta."""

    request_id: str
    sampler: RowSampler
    position: int
    rope_delta: int


class DecodeBatch:
    """Rows come one by one with their own cache, and leave at any step."""

    def __init__(self, language_model: Any) -> None:
        self._language_model = language_model
        self._has_rope_index = hasattr(language_model, "get_rope_index")
        self._rows: list[_Row] = []
        self._cache: list[Any] = []
        self._tokens: mx.array | None = None

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(row.request_id for row in self._rows)

    def join(self, request_id: str, prefill: Prefill, logits: mx.array) -> None:
        """Add a prefilled row; its first token is drawn from `logits` (1, vocabulary).

        The rows that run are left as they were if this fails.
        """
        sampler = RowSampler.of(prefill.sampling)
        tokens = sample(logits, [sampler])
        cache = [type(layer).merge([layer]) for layer in prefill.cache]
        if self._tokens is not None:
            extended = [copy.copy(layer) for layer in self._cache]
            for layer, other in zip(extended, cache, strict=True):
                layer.extend(other)
            cache, tokens = extended, mx.concatenate([self._tokens, tokens])
        mx.eval(tokens, [layer.state for layer in cache])
        self._cache, self._tokens = cache, tokens
        self._rows.append(_Row(request_id, sampler, prefill.num_tokens, prefill.rope_delta))

    def leave(self, request_ids: Collection[str]) -> None:
        """Drop rows, and what they were about to draw. Ids that are not here are no error."""
        kept = [i for i, row in enumerate(self._rows) if row.request_id not in request_ids]
        if len(kept) == len(self._rows):
            return
        self._rows = [self._rows[i] for i in kept]
        if not kept:
            self._cache, self._tokens = [], None
            return
        indices = mx.array(kept)
        for layer in self._cache:
            layer.filter(indices)
        assert self._tokens is not None
        self._tokens = self._tokens[indices]

    def step(self) -> dict[str, int]:
        """Launch the next step for all rows; the tokens of the step before, by request."""
        if self._tokens is None:
            return {}
        drawn = self._tokens
        self._tokens = self._launch(drawn)
        return dict(zip(self.request_ids, np.array(drawn).tolist(), strict=True))

    def _launch(self, tokens: mx.array) -> mx.array:
        kwargs = {"position_ids": self._position_ids()} if self._has_rope_index else {}
        output = self._language_model(tokens[:, None], cache=self._cache, **kwargs)
        following = sample(output.logits[:, -1], [row.sampler for row in self._rows])
        mx.async_eval(following, _counters(self._cache))  # type: ignore[no-untyped-call]
        for row in self._rows:
            row.position += 1
        return following

    def _position_ids(self) -> mx.array:
        """(3, rows, 1): where each row's next token stands."""
        places = mx.array([[row.position + row.rope_delta] for row in self._rows])
        return mx.broadcast_to(places[None], (3, *places.shape))


def _counters(cache: list[Any]) -> list[mx.array]:
    """Small arrays that layers count in: left lazy, each would grow a graph of every step."""
    found = (getattr(layer, "offset", None) for layer in cache)
    return [counter for counter in found if isinstance(counter, mx.array)]
