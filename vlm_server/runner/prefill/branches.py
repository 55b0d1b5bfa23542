"""The options of a question, scored as branches: rows that begin with copies of its prompt's KV.

The tokens of each option are input, and the log probability of each is read after the one before
it; that of the end of the answer is read after the last. Nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from vlm_server.errors import InternalError
from vlm_server.interfaces import Branches, PreparedPrompt
from vlm_server.protocol import Decision
from vlm_server.runner.device.arrays import to_numpy
from vlm_server.runner.kv.batch_cache import branch
from vlm_server.runner.kv.layers import buffers_of, can_store
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.model.adapters import adapters_of_rows
from vlm_server.runner.model.mrope import next_position_ids

Options = Sequence[tuple[int, ...]]
"""Token ids of each option; no two are equal."""


class _Launched(NamedTuple):
    """Log probabilities of branches, lazy.

    first: (branches,), of first tokens. later: (branches, columns), at column i of the token after
    token `start` + i. ends: (branches, columns), of the end after token `start` + i; best_ends:
    those of the likeliest end token.
    """

    branches: Branches
    first: mx.array
    later: mx.array
    ends: mx.array
    best_ends: mx.array


class OptionScore(NamedTuple):
    """Log probabilities of an option's tokens, and of the end after them: of any end token, and of
    the likeliest."""

    tokens: tuple[float, ...]
    end: float
    best_end: float

    @property
    def total(self) -> float:
        return sum(self.tokens) + self.end


class OptionBranches:
    """The options of one prompt, scored in groups: one `result` follows each `launch`."""

    def __init__(self, loaded: LoadedModel, prompt: PreparedPrompt) -> None:
        self._loaded = loaded
        self._prompt = prompt
        self._scores: list[OptionScore] = []
        """Of the options so far, in order."""
        self._launched: list[_Launched] = []
        """The calls under way."""
        self._partial: list[float] = []
        """Log probabilities of the first tokens of an option that is scored in several calls."""
        self._partial_layers: list[Any] | None = None
        """The layers of that option; no other prefill or encode begins before its end."""

    def launch(self, cache: list[Any], logits: mx.array, branches: Sequence[Branches]) -> None:
        """Begin the options of `branches`.

        cache: the layers of the whole prompt, which are not changed. logits: after its last token,
        (1, vocabulary).
        """
        assert branches[0].first == len(self._scores)
        logits = logits.astype(mx.float32)
        logprobs = (logits - mx.logsumexp(logits, axis=-1, keepdims=True))[0]
        self._launched = [self._launch(cache, logprobs, each) for each in branches]

    def _launch(self, cache: list[Any], logprobs: mx.array, branches: Branches) -> _Launched:
        options, start = self._options_of(branches), branches.start
        token_ids = np.zeros((len(options), branches.width - start + 1), dtype=np.int32)
        for row, option in enumerate(options):
            part = option[start : branches.width + 1]
            token_ids[row, : len(part)] = part
        ids = mx.array(token_ids)
        layers, self._partial_layers = self._partial_layers, None
        if layers is None:
            layers = branch(cache, len(options))
        logits = self._append(ids[:, :-1], layers, start)
        launched = _Launched(branches, logprobs[ids[:, 0]], *self._logprobs(logits, ids[:, 1:]))
        mx.async_eval(launched[1:])  # type: ignore[no-untyped-call]
        if branches.width < len(options[-1]):
            self._partial_layers = layers
            mx.async_eval(buffers_of(layers))  # type: ignore[no-untyped-call]
        return launched

    def _options_of(self, branches: Branches) -> Options:
        return self._prompt.options[branches.first : branches.end]

    def result(self) -> None:
        """Wait for the options that were launched. Raises InternalError for NaN."""
        launched, self._launched = self._launched, []
        for each in launched:
            self._read(each)

    def _read(self, launched: _Launched) -> None:
        first, later, ends, best_ends = map(to_numpy, launched[1:])
        start, width = launched.branches.start, launched.branches.width
        for row, option in enumerate(self._options_of(launched.branches)):
            tokens = self._partial if start else [float(first[row])]
            last = len(option) - 1 - start
            tokens += map(float, later[row, :last])
            if width < len(option):
                self._partial = tokens
                return
            end, best_end = float(ends[row, last]), float(best_ends[row, last])
            score = OptionScore(tuple(tokens), end, best_end)
            if np.isnan(score.total):
                raise InternalError("The model's scores for the next token are NaN.")
            self._scores.append(score)

    def decision(self) -> Decision:
        """The result, after the last option."""
        scores = self._scores
        greedy = greedy_option(self._prompt.options, scores)
        return Decision(tuple(score.total for score in scores), greedy)

    def _append(self, token_ids: mx.array, cache: list[Any], first: int) -> mx.array:
        """Logits after each of `token_ids`, (branches, columns, vocabulary), lazy.

        first: the place of the first column in the options.

        Token by token where mlx-vlm's own batched caches may not take several tokens of a row.
        """
        loaded, prompt = self._loaded, self._prompt
        rows, width = token_ids.shape
        size = width if can_store(loaded.language_model) else 1
        steps = []
        for start in range(0, width, size):
            position = prompt.num_tokens + prompt.rope_delta + first + start
            inputs = next_position_ids(loaded.decode_positions, [position] * rows, size)
            inputs |= adapters_of_rows([prompt.adapter] * rows)
            step = token_ids[:, start : start + size]
            steps.append(loaded.text.step_once(step, cache, inputs))
        loaded.forget_positions()
        return mx.concatenate(steps, axis=1)

    def _logprobs(self, logits: mx.array, next_ids: mx.array) -> tuple[mx.array, ...]:
        """Log probabilities of `next_ids`, of any end token and of the likeliest one."""
        logits = logits.astype(mx.float32)
        total = mx.logsumexp(logits, axis=-1)
        later = mx.take_along_axis(logits, next_ids[..., None], axis=-1)[..., 0] - total
        size = logits.shape[-1]
        end_ids = [i for i in sorted(self._loaded.spec.eos_token_ids) if i < size]
        if not end_ids:
            return later, mx.zeros_like(later), mx.zeros_like(later)
        ends = logits[..., mx.array(end_ids)]
        return later, mx.logsumexp(ends, axis=-1) - total, ends.max(axis=-1) - total


def greedy_option(options: Options, scores: Sequence[OptionScore]) -> int:
    """The option that greedy sampling would choose, if only tokens of options were allowed.

    Token by token, the likeliest that continues an option; or the end, where one is complete.
    """
    alive, depth = list(range(len(options))), 0
    while len(alive) > 1:
        logprobs: dict[int | None, float] = {}
        for index in alive:
            tokens = scores[index].tokens
            if depth == len(tokens):
                logprobs[None] = scores[index].best_end
            else:
                logprobs.setdefault(options[index][depth], tokens[depth])
        best = max(logprobs, key=lambda token: logprobs[token])
        if best is None:
            return next(i for i in alive if len(options[i]) == depth)
        alive = [i for i in alive if options[i][depth : depth + 1] == (best,)]
        depth += 1
    return alive[0]
