"""One step: the scheduler's plan, and the runner's result."""

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
from vlm_server.protocol import Decision, OnDevice, SamplingParams, Submit


class SeqId(NamedTuple):
    """A sequence of the decode batch: one choice of a request."""

    request_id: str
    choice: int = 0


@dataclass(frozen=True, slots=True)
class PrepareWork:
    """The preparation of a request; without `use_disk`, it ignores the disk cache."""

    submit: Submit
    cancellation: Cancellation
    use_disk: bool = True


@dataclass(frozen=True, slots=True)
class DiskReadWork:
    """The disk read of a request."""

    request_id: str
    disk_read: DiskRead
    cancellation: Cancellation


@dataclass(frozen=True, slots=True)
class EncodeWork:
    """The encode of the media of span `span_index` of a request's prompt, from `inputs`."""

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

        The number of tokens, the shapes of all inputs, and the values of integer inputs.
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

    @property
    def snapshot(self) -> Any:
        """The state of layers that can't be cut; None if there are none."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that is new to the runner."""

    request_id: str
    prompt: PreparedPrompt
    sampling: SamplingParams
    prefix: PrefixState
    """The cached prefix, after which its prefill starts; may be evicted after the step."""
    features: tuple[EncodedImage, ...] = ()
    """The features of the spans after `prefix`, in order; may be evicted after the step."""


class Branches(NamedTuple):
    """Options `first` to `end` of a prompt, as branches in one call, padded to `width` tokens.

    A long option may be scored alone in several calls, which go on at its token `start`; before the
    last one, `width` is less than its length.
    """

    first: int
    end: int
    width: int
    start: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all, with padding."""
        return (self.end - self.first) * (self.width - self.start)


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """The prefill of tokens `start` to `end` of a prompt, and then of some of its options.

    If it `is_last`, all sequences of the request are sampled and join the decode batch, or its
    result is complete.
    """

    request_id: str
    start: int
    end: int
    is_last: bool
    branches: tuple[Branches, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.end - self.start

    @property
    def num_branch_tokens(self) -> int:
        """Tokens of all branches, with padding."""
        return sum(branches.num_tokens for branches in self.branches)


_NO_DEVICE_WORK = OnDevice()


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan of one step."""

    # For the other threads.
    prepare: tuple[PrepareWork, ...] = ()
    disk_read: DiskReadWork | None = None
    encode: tuple[EncodeWork, ...] = ()
    """Media to encode in one call, before the step is launched."""
    encode_during_step: tuple[EncodeWork, ...] = ()
    """Media to encode once the step is launched."""
    # For the runner.
    finished_seqs: tuple[SeqId, ...] = ()
    """Sequences to drop."""
    stored_prompts: tuple[str, ...] = ()
    """Requests whose prompts to store in the prefix cache: the last chunk was in the previous step,
    or the prefill was cancelled after some chunks."""
    stored_answers: tuple[SeqId, ...] = ()
    """Finished sequences to store in the prefix cache."""
    new: tuple[NewRequest, ...] = ()
    """Requests to add. If there are any, they are exactly those of `prefills`."""
    decode: tuple[SeqId, ...] = ()
    prefills: tuple[PrefillWork, ...] = ()
    """The chunk of one prompt; or of several, which are whole new prompts that start after the same
    number of tokens: a batched prefill."""
    # For the scheduler and the loop.
    on_device: OnDevice = _NO_DEVICE_WORK
    """The work that is under way once the step is launched."""
    on_device_during_step: OnDevice = _NO_DEVICE_WORK
    """The same once `encode_during_step` is started."""
    refused: Mapping[str, RequestError] = field(default_factory=dict)
    """Requests that do not fit into device memory even alone."""
    has_requests: bool = False
    """Whether any request is live."""
    waits_for_memory: bool = False
    """Whether a request is in the state `WAITING_FOR_MEMORY`."""
    waits_for_first_token: bool = False
    """Whether a request `waits_for_first_token` (`State`)."""
    is_drained: bool = False
    """Whether no request is left, and none will be accepted."""
    is_idle: bool = True
    """Whether the scheduler tracks no request or sequence any more."""

    @property
    def has_runner_work(self) -> bool:
        has_steps = self.new or self.decode or self.prefills
        return bool(has_steps or self.finished_seqs or self.stored_prompts)

    @property
    def is_batched_prefill(self) -> bool:
        return len(self.prefills) > 1

    @property
    def num_prefill_tokens(self) -> int:
        """The tokens of all chunks, padded to the longest."""
        return len(self.prefills) * max((chunk.num_tokens for chunk in self.prefills), default=0)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log probability of a token, and the likeliest tokens in its place.

    Probabilities are the model's own, before temperature, penalties and bias.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, log probability) of each."""


class DraftCounts(NamedTuple):
    """The numbers of draft tokens of a sequence that a step verified, and accepted."""

    num_drafted: int = 0
    num_accepted: int = 0
    is_trained: bool = False
    """Whether a trained drafter made them."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step.

    A runner may run one step ahead: the tokens may be those of the previous step.
    """

    tokens: Mapping[SeqId, Sequence[int]] = field(default_factory=dict)
    """Sampled tokens. A sequence's first token comes with its prompt's last chunk, or later. A
    sequence with verified drafts gets the accepted ones and one more."""
    failures: Mapping[str, RequestError] = field(default_factory=dict)
    """Requests that failed, with all their sequences."""
    logprobs: Mapping[SeqId, Sequence[TokenLogprobs]] = field(default_factory=dict)
    """Log probabilities of all tokens of a sequence, if requested."""
    drafts: Mapping[SeqId, DraftCounts] = field(default_factory=dict)
    """Sequences whose draft tokens were verified."""
    pooled: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """(vectors, dimensions) of requests that want vectors, each with its prompt's last chunk; a
    score is one number."""
    decisions: Mapping[str, Decision] = field(default_factory=dict)
    """The results of questions, each with the last of its options; in the order of
    `PreparedPrompt.options`."""
    prefill_seconds: float | None = 0.0
    """The time of the prefill; None in a mixed step."""
    error: str | None = None
    """The error that the model or the device raised."""
