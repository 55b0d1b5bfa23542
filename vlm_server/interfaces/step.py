"""What one step does, as the scheduler plans it, and what it brought, as the runner tells it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from vlm_server.cache.caches import EncodedImage
from vlm_server.cache.disk.tier import DiskRead
from vlm_server.cache.prompt_key import MediaSpan
from vlm_server.errors import RequestError
from vlm_server.interfaces.prompts import MediaInputs, PreparedPrompt
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.protocol import SamplingParams, Submit


class SeqId(NamedTuple):
    """A sequence of the decode batch: one choice of a request."""

    request_id: str
    choice: int = 0


@dataclass(frozen=True, slots=True)
class PrepareWork:
    """Prepare a request, unless it is cancelled; without `use_disk`, ignore the disk cache."""

    submit: Submit
    cancellation: Cancellation
    use_disk: bool = True


@dataclass(frozen=True, slots=True)
class DiskReadWork:
    """Read the disk's entries of a request's prompt, unless it is cancelled."""

    request_id: str
    disk_read: DiskRead
    cancellation: Cancellation


@dataclass(frozen=True, slots=True)
class EncodeWork:
    """Encode the media of span `span_index` of a request's prompt, from `inputs`."""

    request_id: str
    span_index: int
    prompt: PreparedPrompt
    inputs: MediaInputs

    @property
    def span(self) -> MediaSpan:
        return self.prompt.spans[self.span_index]

    @property
    def token_ids(self) -> NDArray[np.int32]:
        return self.prompt.token_ids[self.span.start : self.span.end]

    @property
    def num_tokens(self) -> int:
        return self.span.end - self.span.start

    @property
    def size(self) -> tuple[object, ...]:
        """The key of media that may be encoded in one call.

        The number of tokens, the shape of every input, and the values of inputs that are no pixels.
        """
        inputs = (
            (name, array.shape, array.tobytes() if array.dtype.kind == "i" else None)
            for name, array in self.inputs.items()
        )
        return (self.num_tokens, *inputs)


class PrefixState(Protocol):
    """The cached prefix of a prefill: the KV of a prompt's first `length` tokens."""

    @property
    def length(self) -> int: ...

    @property
    def segments(self) -> Sequence[tuple[Any, int]]:
        """KV segments in order, each with the number of its first tokens that match."""
        ...

    @property
    def snapshot(self) -> Any:
        """The state of layers that can't be cut; None if there are none."""
        ...


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that the runner meets for the first time in this plan.

    Its prefill starts after `prefix`. features: those of the spans after it, in order. Both may be
    evicted once the step is done.
    """

    request_id: str
    prompt: PreparedPrompt
    sampling: SamplingParams
    prefix: PrefixState
    features: tuple[EncodedImage, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """Prefill tokens `start` to `end`; if `is_last`, sample and join the decode batch.

    All sequences of the request, `sampling.n`, join at once.
    """

    request_id: str
    start: int
    end: int
    is_last: bool

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan of one step.

    For the other threads: `prepare` these requests, `disk_read` for one, `encode` these
    media now, in one call, and `encode_next` once the step is launched. For the runner: drop
    `finished_seqs`, add `new`, decode these sequences, and `prefill` a chunk of one prompt, which
    may be the new one. With it go the prompts of `batched_prefills`: all are new, begin after as
    many cached tokens as the first, and end. The prefix cache gets `stored_prompts`, whose last
    chunks were in the step before, or which are cancelled and stored up to their last chunks; and
    `stored_answers`, of finished sequences. `refused` requests never fit into device memory.

    The rest is for the loop: whether there are requests at all, whether one waits for memory,
    whether one that does not waits for its first token. `is_drained`: no request is left, and none
    will be taken. `is_idle`: nothing is remembered of any request.
    """

    prepare: tuple[PrepareWork, ...] = ()
    disk_read: DiskReadWork | None = None
    encode: tuple[EncodeWork, ...] = ()
    encode_next: tuple[EncodeWork, ...] = ()
    finished_seqs: tuple[SeqId, ...] = ()
    stored_prompts: tuple[str, ...] = ()
    stored_answers: tuple[SeqId, ...] = ()
    new: tuple[NewRequest, ...] = ()
    decode: tuple[SeqId, ...] = ()
    prefill: PrefillWork | None = None
    batched_prefills: tuple[PrefillWork, ...] = ()
    refused: Mapping[str, RequestError] = field(default_factory=dict)
    has_requests: bool = False
    waits_for_memory: bool = False
    waits_for_first_token: bool = False
    is_drained: bool = False
    is_idle: bool = True

    @property
    def has_runner_work(self) -> bool:
        return bool(self.finished_seqs or self.new or self.decode or self.prefill)

    @property
    def prefills(self) -> tuple[PrefillWork, ...]:
        """The chunks of all prompts."""
        return () if self.prefill is None else (self.prefill, *self.batched_prefills)

    @property
    def num_prefill_tokens(self) -> int:
        """The tokens of all chunks, padded to the longest."""
        works = self.prefills
        return len(works) * max((work.num_tokens for work in works), default=0)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log probability of a token, and the likeliest tokens, (token id, log probability) each.

    Probabilities are the model's own, before temperature, penalties and bias.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class DraftCounts(NamedTuple):
    """The numbers of draft tokens that a step verified for a sequence, and accepted."""

    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step: tokens known by now, and requests that failed alone.

    A request that is among the failures fails with all its sequences. `logprobs` holds an entry for
    each token whose request asked for them. A runner may run one step ahead: a token may belong to
    the step before, and a sequence's token may be missing in the step that launched it; its first
    comes with its prompt's last chunk, or later. A step that verified draft tokens of a sequence
    (`drafts`) may bring it several: those that were right, and one more at the end.
    `prefill_seconds`: what the chunk took; None if the decode step read it. `error` is what
    the model or the device raised, if they did.
    """

    tokens: Mapping[SeqId, Sequence[int]] = field(default_factory=dict)
    failures: Mapping[str, RequestError] = field(default_factory=dict)
    logprobs: Mapping[SeqId, Sequence[TokenLogprobs]] = field(default_factory=dict)
    drafts: Mapping[SeqId, DraftCounts] = field(default_factory=dict)
    prefill_seconds: float | None = 0.0
    error: str | None = None
