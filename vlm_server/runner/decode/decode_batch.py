"""A batch of sequences that decode in one forward pass, and its KV cache.

A step is `forward`, the model on the newest tokens, and `sample`, the tokens after them. Steps run
one ahead of `result`, which reads and reports the tokens that `forward` began with, so the device
works while the host reads. A sequence's first token is reported by `join`. Where sequences have
grammars, the host reads the newest tokens and advances the grammars between `forward` and `sample`.

Where drafts promise more, the host reads the newest tokens first, and the step is a `WideStep`.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Collection, Mapping
from typing import Any

import mlx.core as mx

from vlm_server.errors import RequestError
from vlm_server.interfaces import AnswerMatcher, SeqId
from vlm_server.runner.decode.head_drafts import HeadDrafts
from vlm_server.runner.decode.sequence import (
    DecodingSequence,
    NewTokens,
    Sampled,
    by_sequence,
    new_sequences,
    sample_next,
)
from vlm_server.runner.decode.speculation import DraftChoice, Speculation
from vlm_server.runner.decode.wide_step import (
    PlainStep,
    WideStep,
    layers_of_step,
    token_ids_of,
)
from vlm_server.runner.device.arrays import to_numpy
from vlm_server.runner.kv import batch_cache
from vlm_server.runner.kv.layers import buffers_of
from vlm_server.runner.kv.prompt_kv import PrefixEntry, PromptKV
from vlm_server.runner.kv.segments import snapshot
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.model.adapters import adapters_of_rows
from vlm_server.runner.model.chunks import PromptChunk, StepOutput
from vlm_server.runner.model.mrope import next_position_ids
from vlm_server.runner.sampling import NO_TOKEN


class BatchState(enum.Enum):
    """The state of a batch between two calls."""

    IDLE = "idle"
    """No step is under way: sequences may join, and single ones be removed."""
    FORWARDED = "forwarded"
    """The model runs on the newest tokens, which are unread. Requests may be detached."""
    SAMPLED = "sampled"
    """The next tokens are sampled, and those before them not read yet."""
    WAITING = "waiting"
    """A detached batch: the model ran on the newest tokens, which are read; masks are awaited."""


_NEXT_STATE = {
    (BatchState.IDLE, "forward"): BatchState.FORWARDED,
    (BatchState.FORWARDED, "sample"): BatchState.SAMPLED,
    (BatchState.SAMPLED, "result"): BatchState.IDLE,
    (BatchState.FORWARDED, "result"): BatchState.WAITING,
    (BatchState.WAITING, "sample"): BatchState.IDLE,
}
"""The legal calls. The main batch cycles through the first three; a detached batch cycles through
the last two."""


class DecodeBatch:
    """Sequences that decode in the same steps; those of a request join at the same time.

    A batch without sequences ignores `forward`, `sample` and `result`.
    """

    def __init__(self, loaded: LoadedModel, speculation: Speculation | None = None) -> None:
        """Without `speculation` no drafts are verified."""
        self._loaded = loaded
        self._speculation = speculation or Speculation()
        self._state = BatchState.IDLE
        self._seqs: list[DecodingSequence] = []
        self._cache: list[Any] = []
        """`LoadedModel.new_layers` of all sequences."""
        self._head = HeadDrafts(loaded)
        self._newest: NewTokens | None = None
        """The tokens that the next `forward` appends; None while a step is under way."""
        self._step: PlainStep | WideStep | None = None
        """The step under way: a plain one until it is sampled, a wide one until it is read."""
        self._unread: tuple[list[DecodingSequence], NewTokens] | None = None
        """The tokens that `result` will read, and their sequences."""

    @property
    def seq_ids(self) -> tuple[SeqId, ...]:
        return tuple(seq.id for seq in self._seqs)

    @property
    def pending_arrays(self) -> list[Any]:
        """The arrays that are computed last of all that was launched."""
        newest = [] if self._newest is None else [self._newest.tokens]
        logits = [] if self._step is None else [self._step.logits]
        return [*newest, *logits, *self._head.arrays, buffers_of(self._cache)]

    @property
    def num_guided(self) -> int:
        """Sequences with a grammar."""
        return len(self._with_matchers())

    def join(self, prompts: Mapping[str, PromptKV], logits: mx.array) -> Sampled:
        """Add a sequence for each choice of prefilled requests; returns their first tokens.

        prompts: that of one request, or those of a batched prefill. logits: (prompts, vocabulary).
        Each sequence gets a copy of the prompt's cache, or the cache itself if it is the only one
        here. If this fails, nothing has changed. See `result` for `NO_TOKEN`.
        """
        assert self._state is BatchState.IDLE
        seqs = [
            seq
            for request_id, prompt_kv in prompts.items()
            for seq in new_sequences(
                request_id,
                prompt_kv,
                self._loaded.spec.eos_token_ids,
                logits.shape[-1],
                verifies_drafts=bool(self._speculation.widths),
            )
        ]
        self._speculation.discard_time()
        try:
            return self._join(seqs, list(prompts.values()), logits)
        except Exception:
            for seq in seqs:
                seq.sampler.close()
            raise

    def _join(
        self, seqs: list[DecodingSequence], prompts: list[PromptKV], logits: mx.array
    ) -> Sampled:
        self._head.catch_up(self._cache, self._seqs)
        rows = [row for row, prompt_kv in enumerate(prompts) for _ in range(prompt_kv.sampling.n)]
        first_tokens, logprobs = sample_next(logits[mx.array(rows)], seqs, self._loaded.ranks)
        if len(prompts) == 1:
            cache = batch_cache.join(self._cache, len(self._seqs), prompts[0].cache, len(seqs))
        else:
            cache = batch_cache.join_rows(self._cache, len(self._seqs), prompts[0].cache, rows)
        newest = self._newest
        tokens = first_tokens if newest is None else mx.concatenate([newest.tokens, first_tokens])
        mx.eval(first_tokens, tokens, buffers_of(cache))
        sampled = Sampled(logprobs=by_sequence(logprobs))
        self._cache = cache
        self._head.join([prompts[row].hidden for row in rows])
        self._newest = NewTokens(tokens, [] if newest is None else newest.logprobs)
        self._seqs += seqs
        for seq, token in zip(seqs, to_numpy(first_tokens).tolist(), strict=True):
            seq.follow([token])
            sampled.tokens[seq.id] = [token]
        return sampled

    def runs_on(self, cache: list[Any]) -> bool:
        """Whether `cache` is that of the only sequence here, rather than one that was copied."""
        return self._cache is cache

    def grammar_error(self, seq_id: SeqId) -> RequestError | None:
        """The error with which a sequence's grammar ends it; None if it does not."""
        matchers = (seq.sampler.matcher for seq in self._seqs if seq.id == seq_id)
        return next((matcher.error for matcher in matchers if matcher is not None), None)

    def entry(self, seq_id: SeqId) -> PrefixEntry | None:
        """The prefix cache's entry of a sequence, valid until the next launch or removal.

        None if the sequence was removed.
        """
        for row, seq in enumerate(self._seqs):
            if seq.id == seq_id:
                self._head.catch_up(self._cache, self._seqs)
                layer_states = snapshot(self._cache, row if len(self._seqs) > 1 else None)
                return seq.prefix_entry(self._cache, row, layer_states)
        return None

    def remove(self, seq_ids: Collection[SeqId]) -> None:
        """Remove those of the sequences that are here; during a step, all of them."""
        staying = [i for i, seq in enumerate(self._seqs) if seq.id not in seq_ids]
        for seq in self._seqs:
            if seq.id in seq_ids:
                seq.sampler.close()
        if len(staying) < len(self._seqs):
            assert not staying or self._unread is None
            self._keep(staying)
            if not staying:
                self._state, self._unread = BatchState.IDLE, None

    def detach(self, request_id: str) -> DecodeBatch:
        """Move a request's sequences to a batch of their own, while this one is `FORWARDED`."""
        assert self._state is BatchState.FORWARDED
        assert isinstance(self._step, PlainStep)
        rows = [i for i, seq in enumerate(self._seqs) if seq.id.request_id == request_id]
        other = DecodeBatch(self._loaded)
        other._state = BatchState.WAITING  # `result` of this batch reads the newest tokens of all
        other._seqs = [self._seqs[i] for i in rows]
        other._step = PlainStep(self._step.logits[mx.array(rows)])
        other._head = self._head.rows(rows)
        other._cache = self._cache
        if len(rows) < len(self._seqs):
            other._cache = batch_cache.detach_rows(self._cache, rows)
            mx.eval(other.pending_arrays)
        self._keep([i for i in range(len(self._seqs)) if i not in rows])
        return other

    def reattach(self, other: DecodeBatch) -> None:
        """Add all sequences of `other`, while both are `IDLE`."""
        assert self._state is other._state is BatchState.IDLE
        newest = [batch._newest for batch in (self, other) if batch._newest is not None]
        for batch in (self, other):
            batch._head.catch_up(batch._cache, batch._seqs)
        self._head.join(other._head.arrays)
        self._cache = batch_cache.reattach_rows(
            self._cache, len(self._seqs), other._cache, len(other._seqs)
        )
        self._newest = NewTokens(
            mx.concatenate([new.tokens for new in newest]),
            [logprobs for new in newest for logprobs in new.logprobs],
        )
        self._seqs = self._seqs + other._seqs
        mx.eval(self.pending_arrays)

    def forward(self, chunk: PromptChunk | None = None) -> StepOutput | None:
        """Begin the model's part of the next step, if there is a sequence.

        With `chunk` it may be a mixed step, which verifies no drafts. Returns the chunk's output;
        None if the chunk is not part of it. Grammars advance while the device works.
        """
        if self._newest is None:
            return None
        self._move("forward")
        drafts = self._new_drafts() if chunk is None else None
        newest, self._newest = self._newest, None
        self._unread = self._seqs, newest
        places = [seq.position + seq.prompt.rope_delta for seq in self._seqs]
        token_ids = newest.tokens[:, None] if drafts is None else drafts[0]
        layers = self._loaded.model_layers(self._cache)
        inputs = next_position_ids(self._loaded.decode_positions, places, token_ids.shape[1])
        inputs |= adapters_of_rows([seq.prompt.adapter for seq in self._seqs])
        layers = layers if drafts is None else layers_of_step(layers)
        output, chunk_output = self._loaded.text.step(token_ids, layers, inputs, chunk)
        if drafts is not None:
            self._step = WideStep(self._seqs, output, drafts[1], layers, self._loaded.ranks)
            return None
        self._step = PlainStep(output.logits[:, -1])
        self._head.add(output.hidden, [1] * len(self._seqs))
        self._advance_grammars(newest, self._step.logits)
        for seq in self._seqs:
            seq.position += 1
        return chunk_output

    def late_requests(self, seconds: float) -> list[str]:
        """Requests whose masks for the next tokens are not known within `seconds`."""
        deadline = time.monotonic() + seconds
        request_ids = dict[str, None]()
        for seq, matcher in self._with_matchers():
            if not matcher.wait(max(deadline - time.monotonic(), 0.0)):
                request_ids[seq.id.request_id] = None
        return list(request_ids)

    def sample(self) -> None:
        """Begin to sample the next tokens. No grammar may be late."""
        if self._state is BatchState.IDLE and not self._seqs:
            return
        self._move("sample")
        if isinstance(self._step, WideStep):
            self._step.sample()
        elif self._step is not None:  # else all sequences were detached
            for seq, _ in self._with_matchers():
                seq.sampler.take_mask()
            tokens, logprobs = sample_next(self._step.logits, self._seqs, self._loaded.ranks)
            self._newest, self._step = NewTokens(tokens, logprobs), None
            state = batch_cache.counters(self._cache)
            state += [array for seq in self._seqs for array in seq.sampler.state]
            state += [array for step in logprobs for array in step.arrays]
            state += self._head.arrays
            mx.async_eval(tokens, state)  # type: ignore[no-untyped-call]

    def finish_late_step(self) -> None:
        """Sample the tokens of a detached batch's step, whose masks are known by now."""
        assert self._state is BatchState.WAITING
        self.sample()

    def lower_priority(self) -> None:
        """Lower the priority of the processes that follow the grammars here."""
        for _, matcher in self._with_matchers():
            matcher.lower_priority()

    def result(self) -> Sampled:
        """The tokens that `forward` began with and `join` has not reported, and accepted drafts.

        `NO_TOKEN` for a sequence to be removed: its logits are NaN, or its grammar ends it.
        """
        sampled = Sampled()
        if self._unread is None:
            return sampled
        self._move("result")
        (seqs, newest), self._unread = self._unread, None
        for seq, token in zip(seqs, to_numpy(newest.tokens).tolist(), strict=True):
            seq.token_ids.append(token)
            if not seq.newest_token_followed:
                seq.follow([token])
            if not seq.newest_token_reported:
                sampled.tokens[seq.id] = [token]
            seq.newest_token_reported = seq.newest_token_followed = False
        logprobs = by_sequence(newest.logprobs)
        sampled.logprobs = {seq: logprobs[seq] for seq in logprobs if seq in sampled.tokens}
        step = self._step
        if isinstance(step, WideStep):
            self._step = None
            self._accept(step, sampled)
            self._speculation.record_step(len(self._seqs), step.width, by_head=step.choice.by_head)
        else:
            self._speculation.record_step(len(self._seqs), 1)
        self._head.bound(self._cache, self._seqs)
        return sampled

    def _move(self, call: str) -> None:
        """Enter the state that `call` leads to."""
        next_state = _NEXT_STATE.get((self._state, call))
        assert next_state is not None, f"{call} of a batch that is {self._state.value}"
        self._state = next_state

    def _new_drafts(self) -> tuple[mx.array, DraftChoice] | None:
        """The token ids of a wide step and the drafts among them; None if a plain one is better.

        A wide step needs the newest tokens on the host.
        """
        if self._newest is None or not self._speculation.can_gain(self._seqs):
            return None
        tokens = self._follow_newest(self._newest)
        by_head = self._head.after(self._cache, self._seqs, tokens)
        eos_token_ids = self._loaded.spec.eos_token_ids
        choice = self._speculation.drafts(self._seqs, eos_token_ids, by_head)
        if choice is None:
            return None
        return token_ids_of(tokens, choice.width, choice.token_ids), choice

    def _accept(self, wide: WideStep, sampled: Sampled) -> None:
        """Keep the tokens that `wide` verified, and report all of them but `NO_TOKEN`.

        The next plain step reports that: the tokens before it may have ended the answer.
        """
        last_tokens = []
        rows, logprobs = wide.result()
        for seq, tokens in zip(self._seqs, rows, strict=True):
            seq.follow(tokens)
            seq.newest_token_reported = tokens[-1] != NO_TOKEN
            seq.token_ids += tokens[:-1]
            last_tokens.append(tokens[-1])
            if reported := tokens if seq.newest_token_reported else tokens[:-1]:
                sampled.tokens.setdefault(seq.id, []).extend(reported)
            if seq.id in logprobs:
                sampled.logprobs.setdefault(seq.id, []).extend(logprobs[seq.id][: len(reported)])
        sampled.drafts = wide.counts
        self._speculation.record_drafts(wide.counts.values())
        self._head.add(wide.hidden, [len(tokens) for tokens in rows])
        self._newest = NewTokens(mx.array(last_tokens, dtype=mx.int32), [])
        if self._speculation.needs_even_rows:
            batch_cache.even_out(self._cache)

    def _keep(self, rows: list[int]) -> None:
        self._speculation.discard_time()
        self._head = self._head.rows(rows)
        self._seqs = [self._seqs[i] for i in rows]
        if not rows:
            self._cache, self._newest, self._step = [], None, None
            return
        self._cache = batch_cache.filter_rows(self._cache, rows)
        if self._newest is not None:
            self._newest.keep(rows)
        if self._step is not None:
            assert isinstance(self._step, PlainStep)
            self._step.keep(rows)

    def _with_matchers(self) -> list[tuple[DecodingSequence, AnswerMatcher]]:
        return [(seq, seq.sampler.matcher) for seq in self._seqs if seq.sampler.matcher is not None]

    def _advance_grammars(self, newest: NewTokens, logits: mx.array) -> None:
        """Advance the grammars while the device works on `logits`."""
        if self._with_matchers():
            mx.async_eval(logits)  # type: ignore[no-untyped-call]
            self._follow_newest(newest)

    def _follow_newest(self, newest: NewTokens) -> list[int]:
        """Read the newest tokens, and hand them to the drafters and grammars that lack them."""
        token_ids: list[int] = to_numpy(newest.tokens).tolist()
        for seq, token_id in zip(self._seqs, token_ids, strict=True):
            if not seq.newest_token_followed:
                seq.follow([token_id])
        return token_ids
