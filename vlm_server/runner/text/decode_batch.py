"""A batch of sequences that decode together, and its KV cache.

A step is `forward`, the model on the tokens that were sampled last, and `sample`, the next ones. It
runs one step ahead of what it reports: `forward` begins on those tokens, and only `result` reads
them, so the device works while the host reads. The first token of a sequence is reported when it
joins. Grammars need the tokens before the next are sampled: the host reads them, and grammars
advance, between `forward` and `sample`. `decode_groups` decides what becomes of late ones.

Where drafts promise more, the host reads the tokens first, and the step is a wide one.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_server.cache.prompt_key import PromptKey
from vlm_server.errors import RequestError
from vlm_server.interfaces import AnswerMatcher, SeqId
from vlm_server.runner.device.arrays import read
from vlm_server.runner.kv import batch_cache
from vlm_server.runner.kv.segments import SequenceState, snapshot
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.model.chunks import PromptChunk
from vlm_server.runner.model.mrope import next_position_ids
from vlm_server.runner.sampling import NO_TOKEN, LazyLogprobs, SequenceSampler, choice_params
from vlm_server.runner.text.drafts import Drafter
from vlm_server.runner.text.prefill import Prefilled, Storable
from vlm_server.runner.text.sequence import DecodingSequence, Sampled, by_sequence, sample_next
from vlm_server.runner.text.speculation import Speculation
from vlm_server.runner.text.wide_step import WideStep

_Unread = tuple[list[DecodingSequence], mx.array, list[LazyLogprobs]]


class DecodeBatch:
    """Sequences join with their prompt's cache, those of a request together.

    Each may be removed after any step.
    """

    def __init__(self, loaded: LoadedModel, speculation: Speculation | None = None) -> None:
        """Without `speculation` no drafts are verified."""
        self._loaded = loaded
        self._speculation = speculation or Speculation()
        self._seqs: list[DecodingSequence] = []
        self._cache: list[Any] = []
        self._tokens: mx.array | None = None
        """The newest tokens, (sequences,); None between `forward` and `sample`, and if empty."""
        self._logprobs: list[LazyLogprobs] = []
        self._logits: mx.array | None = None
        """(sequences, vocabulary), lazy, to be sampled from; None before `forward`.

        Of a wide step, (sequences, width, vocabulary).
        """
        self._unread: _Unread | None = None
        """The sequences, tokens and logprobs of the step before, which are on the device."""
        self._wide: WideStep | None = None
        """The step that verifies drafts, from `forward` to `result`."""

    @property
    def seq_ids(self) -> tuple[SeqId, ...]:
        return tuple(seq.id for seq in self._seqs)

    @property
    def launched(self) -> list[Any]:
        """Arrays that are computed last of all that was launched."""
        last = [array for array in (self._tokens, self._logits) if array is not None]
        return [*last, [layer.state for layer in self._cache]]

    @property
    def num_guided(self) -> int:
        """Sequences that follow a grammar."""
        return len(self._guided())

    def join(self, prefills: Mapping[str, Prefilled], logits: mx.array) -> Sampled:
        """Add a sequence for each choice of prefilled requests; their first tokens.

        Of one request, or of a batched prefill; sampled from `logits` (requests, vocabulary),
        between two steps. Each sequence gets a copy of the prompt's cache, or the cache itself if
        it is alone. If this fails, nothing has changed. See `result` for `NO_TOKEN`.
        """
        seqs = [
            seq
            for request_id, prefill in prefills.items()
            for seq in self._new_seqs(request_id, prefill, logits.shape[-1])
        ]
        self._speculation.discard_time()
        try:
            return self._join(seqs, list(prefills.values()), logits)
        except Exception:
            for seq in seqs:
                seq.sampler.close()
            raise

    def _join(
        self, seqs: list[DecodingSequence], prefills: list[Prefilled], logits: mx.array
    ) -> Sampled:
        rows = [row for row, prefill in enumerate(prefills) for _ in range(prefill.sampling.n)]
        first, logprobs = sample_next(logits[mx.array(rows)], seqs, self._loaded.ranks)
        if len(prefills) == 1:
            cache = batch_cache.joined(self._cache, len(self._seqs), prefills[0].cache, len(seqs))
        else:
            cache = batch_cache.joined_rows(self._cache, len(self._seqs), prefills[0].cache, rows)
        tokens = first if self._tokens is None else mx.concatenate([self._tokens, first])
        mx.eval(first, tokens, [layer.state for layer in cache])
        sampled = Sampled(logprobs=by_sequence(logprobs))
        self._cache, self._tokens = cache, tokens
        self._seqs += seqs
        for seq, token in zip(seqs, read(first).tolist(), strict=True):
            seq.append([token])
            sampled.tokens[seq.id] = [token]
        return sampled

    def runs_on(self, cache: list[Any]) -> bool:
        """Whether this is the cache of the only sequence here, not one that was copied."""
        return self._cache is cache

    def fault(self, seq_id: SeqId) -> RequestError | None:
        """Why a sequence's grammar ends it, if it does."""
        matchers = (seq.sampler.matcher for seq in self._seqs if seq.id == seq_id)
        return next((matcher.fault for matcher in matchers if matcher is not None), None)

    def storable(self, seq_id: SeqId) -> Storable | None:
        """All tokens of a sequence that its cache holds; read it before launching or removing.

        None if it was removed.
        """
        for row, seq in enumerate(self._seqs):
            if seq.id == seq_id:
                answer = np.fromiter(seq.token_ids, dtype=np.int32)
                token_ids = np.concatenate([seq.prompt.token_ids, answer])
                now = snapshot(self._cache, row if len(self._seqs) > 1 else None)
                waits = self._loaded.faults.come_late
                state = SequenceState(self._cache, {len(token_ids): now}, row, waits=waits)
                return PromptKey(token_ids, seq.prompt.spans), state, seq.prompt.cache_salt
        return None

    def remove(self, seq_ids: Collection[SeqId]) -> None:
        """Remove those of the sequences that are here, and their unread tokens."""
        staying = [i for i, seq in enumerate(self._seqs) if seq.id not in seq_ids]
        for seq in self._seqs:
            if seq.id in seq_ids:
                seq.sampler.close()
        if len(staying) < len(self._seqs):
            self._keep(staying)
            self._unread = self._unread if staying else None

    def detach(self, request_id: str) -> DecodeBatch:
        """Move a request's sequences to a batch of their own, between `forward` and `sample`."""
        assert self._logits is not None
        assert self._wide is None
        rows = [i for i, seq in enumerate(self._seqs) if seq.id.request_id == request_id]
        other = DecodeBatch(self._loaded)
        other._seqs = [self._seqs[i] for i in rows]
        other._logits = self._logits[mx.array(rows)]
        other._cache = self._cache
        if len(rows) < len(self._seqs):
            other._cache = batch_cache.separated(self._cache, rows)
            mx.eval(other._logits, [layer.state for layer in other._cache])
        self._keep([i for i in range(len(self._seqs)) if i not in rows])
        return other

    def absorb(self, other: DecodeBatch) -> None:
        """Add all sequences of `other`. Both have sampled, and begun nothing since."""
        assert other._tokens is not None
        tokens = mx.concatenate(
            [each._tokens for each in (self, other) if each._tokens is not None]
        )
        self._cache = batch_cache.merged(
            self._cache, len(self._seqs), other._cache, len(other._seqs)
        )
        self._tokens, self._logprobs = tokens, self._logprobs + other._logprobs
        self._seqs = self._seqs + other._seqs
        mx.eval(tokens, [layer.state for layer in self._cache])

    def forward(self, chunk: PromptChunk | None = None) -> mx.array | None:
        """Begin the model's part of the next step, if there is a sequence.

        With `chunk` it may be a mixed step, which verifies no drafts. Returns the chunk's logits,
        (1, 1, vocabulary), lazy; None if the chunk was not read. Grammars work meanwhile.
        """
        if self._tokens is None:
            return None
        self._wide = self._new_wide_step() if chunk is None else None
        tokens, self._tokens = self._tokens, None
        self._unread = self._seqs, tokens, self._logprobs
        wide, places = self._wide, [seq.position + seq.prompt.rope_delta for seq in self._seqs]
        token_ids = tokens[:, None] if wide is None else wide.token_ids
        positions = next_position_ids(self._loaded.decode_positions, places, token_ids.shape[1])
        logits, chunk_logits = self._loaded.text.step(token_ids, self._cache, positions, chunk)
        if wide is not None:
            self._logits = logits
            return None
        self._logits = logits[:, -1]
        self._advance_grammars(tokens, self._logits)
        for seq in self._seqs:
            seq.position += 1
        return chunk_logits

    def late(self, seconds: float) -> list[str]:
        """Requests whose masks are not known after so much time."""
        deadline = time.monotonic() + seconds
        late = dict[str, None]()
        for seq, matcher in self._guided():
            if not matcher.wait(max(deadline - time.monotonic(), 0.0)):
                late[seq.id.request_id] = None
        return list(late)

    def sample(self) -> None:
        """Begin to sample the next tokens. No grammar may be late."""
        if self._logits is None:
            return
        logits, self._logits = self._logits, None
        if self._wide is not None:
            self._wide.sample(logits)
            return
        for seq, _ in self._guided():
            seq.sampler.take_mask()
        self._tokens, self._logprobs = sample_next(logits, self._seqs, self._loaded.ranks)
        state = _counters(self._cache)
        state += [array for seq in self._seqs for array in seq.sampler.state]
        state += [array for each in self._logprobs for array in each.arrays]
        mx.async_eval(self._tokens, state)  # type: ignore[no-untyped-call]

    def lower_priority(self) -> None:
        """Lower the priority of the grammars here, which were late."""
        for _, matcher in self._guided():
            matcher.lower_priority()

    def result(self) -> Sampled:
        """The tokens that `forward` began with, and those of drafts; not what `join` reported.

        `NO_TOKEN` for a sequence to be removed: its logits are NaN, or its grammar ends it.
        """
        sampled = Sampled()
        if self._unread is None:
            return sampled
        (seqs, tokens, lazy), self._unread = self._unread, None
        for seq, token in zip(seqs, read(tokens).tolist(), strict=True):
            seq.token_ids.append(token)
            if not seq.is_known:
                seq.append([token])
            if not seq.is_reported:
                sampled.tokens[seq.id] = [token]
            seq.is_reported = seq.is_known = False
        logprobs = by_sequence(lazy)
        sampled.logprobs = {seq: logprobs[seq] for seq in logprobs if seq in sampled.tokens}
        wide, self._wide = self._wide, None
        if wide is not None:
            self._accept(wide, sampled)
        self._speculation.record_step(len(self._seqs), 1 if wide is None else wide.width)
        return sampled

    def _new_wide_step(self) -> WideStep | None:
        """The next step, if drafts are worth verifying; then the host knows all tokens."""
        if not self._speculation.may_be_worth_it(self._seqs):
            return None
        assert self._tokens is not None
        tokens = self._append_newest(self._tokens)
        drafts = self._speculation.drafts(self._seqs, self._loaded.spec.eos_token_ids)
        return None if drafts is None else WideStep(self._seqs, tokens, *drafts)

    def _accept(self, wide: WideStep, sampled: Sampled) -> None:
        """Keep the tokens that `wide` verified, and report all but `NO_TOKEN` at once.

        A plain step will report that: the tokens before it may have ended the answer.
        """
        last = []
        taken, logprobs = wide.result(self._cache)
        for seq, tokens in zip(self._seqs, taken, strict=True):
            seq.append(tokens)
            seq.is_reported = tokens[-1] != NO_TOKEN
            seq.token_ids += tokens[:-1]
            last.append(tokens[-1])
            if reported := tokens if seq.is_reported else tokens[:-1]:
                sampled.tokens.setdefault(seq.id, []).extend(reported)
            if seq.id in logprobs:
                sampled.logprobs.setdefault(seq.id, []).extend(logprobs[seq.id][: len(reported)])
        sampled.drafts = wide.counts
        self._tokens, self._logprobs = mx.array(last, dtype=mx.int32), []
        if self._speculation.needs_even_rows:
            batch_cache.even_out(self._cache)

    def _keep(self, rows: list[int]) -> None:
        self._speculation.discard_time()
        self._seqs = [self._seqs[i] for i in rows]
        if not rows:
            self._cache, self._tokens, self._logits, self._logprobs = [], None, None, []
            self._wide = None
            return
        self._cache = batch_cache.filtered(self._cache, rows)
        if self._tokens is not None:
            self._tokens = self._tokens[mx.array(rows)]
        if self._logits is not None:
            self._logits = self._logits[mx.array(rows)]

    def _guided(self) -> list[tuple[DecodingSequence, AnswerMatcher]]:
        return [(seq, seq.sampler.matcher) for seq in self._seqs if seq.sampler.matcher is not None]

    def _new_seqs(
        self, request_id: str, prefill: Prefilled, vocabulary_size: int
    ) -> list[DecodingSequence]:
        count = prefill.sampling.n
        prompt = prefill.prompt
        matchers = prompt.grammar.begin(count) if prompt.grammar else [None] * count
        return [
            DecodingSequence(
                SeqId(request_id, choice),
                SequenceSampler(
                    choice_params(prefill.sampling, choice),
                    prompt.token_ids,
                    self._loaded.spec.eos_token_ids,
                    vocabulary_size,
                    matcher,
                ),
                prompt,
                prompt.num_tokens,
                Drafter(prompt.token_ids, prompt.prediction) if self._speculation.widths else None,
            )
            for choice, matcher in enumerate(matchers)
        ]

    def _advance_grammars(self, tokens: mx.array, logits: mx.array) -> None:
        """Advance the grammars, while the device works on `logits`."""
        if self._guided():
            mx.async_eval(logits)  # type: ignore[no-untyped-call]
            self._append_newest(tokens)

    def _append_newest(self, tokens: mx.array) -> list[int]:
        """Read the newest `tokens`, and hand them to the drafters and grammars without them."""
        token_ids: list[int] = read(tokens).tolist()
        for seq, token_id in zip(self._seqs, token_ids, strict=True):
            if not seq.is_known:
                seq.append([token_id])
        return token_ids


def _counters(cache: list[Any]) -> list[mx.array]:
    """Small arrays that layers count in: left lazy, they would keep all steps' operations."""
    found = (vars(layer).get("offset") for layer in cache)
    return [counter for counter in found if isinstance(counter, mx.array)]
