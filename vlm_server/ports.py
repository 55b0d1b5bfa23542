"""The interfaces between packages: what engine, prompt and runner hand each other.

`engine` decides and `runner` does; `prompt` makes prompts. They meet only here. Token ids, numpy
arrays and plans; no mlx, no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from vlm_server.cache.caches import EncodedImage, Prefix
from vlm_server.cache.disk_load import DiskLoad
from vlm_server.cache.holds import CacheHolds
from vlm_server.cache.prompt_key import MediaSpan, PromptKey
from vlm_server.child.cancellation import Cancellation
from vlm_server.errors import RequestError
from vlm_server.protocol import ImageUse, SamplingParams, Submit

MediaInputs = Mapping[str, NDArray[Any]]
"""What the vision tower takes for one span: `pixel_values`, grids and the like."""


class AnswerMatcher(Protocol):
    """Follows one answer, token by token; another process works out what may come next."""

    @property
    def fault(self) -> RequestError | None:
        """Why the answer can't go on; None if it can."""
        ...

    @property
    def can_look_ahead(self) -> bool:
        """Whether `look_ahead` may tell anything where the answer is now."""
        ...

    @property
    def forced(self) -> Sequence[int]:
        """Tokens that the grammar leaves no choice but to spell, as far as it knows by now."""
        ...

    def advance(self, token_ids: Sequence[int]) -> None:
        """These were drawn, one after another. Returns at once."""
        ...

    def look_ahead(self, token_ids: Sequence[int]) -> None:
        """Ask what may follow each of these, if they were drawn next. Returns at once."""
        ...

    def ahead(self) -> Sequence[NDArray[np.bool_]]:
        """The answer to `look_ahead`, once `wait` says so: (vocabulary,) after each token.

        Shorter if a token may not come, or nobody can tell. Empty once more was drawn.
        """
        ...

    def wait(self, seconds: float) -> bool:
        """Whether `allowed` and `ahead` are known, waiting for them no longer than this."""
        ...

    def allowed(self) -> NDArray[np.bool_]:
        """(vocabulary,): which tokens may come next; none if the answer can't go on."""
        ...

    def yield_to_others(self) -> None:
        """It was waited for: let its work not slow down what others do."""
        ...

    def close(self) -> None:
        """The answer has ended. Closing twice is no error."""
        ...


class Grammar(Protocol):
    """What an answer must follow. It never changes: answers begin on any thread."""

    def begin(self, count: int) -> Sequence[AnswerMatcher]:
        """Matchers at the beginning of so many answers of one request. Returns at once."""
        ...


# ---- prompts -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What the text of an answer is made of.

    tools: those that may be called, as chat templates have them; without any, no call is looked
    for. is_forced: the answer, after a thought perhaps, is nothing but JSON that a grammar ensures:
    `[{"name": ..., "arguments": {...}}, ...]`. parallel: whether there may be more than one call.
    starts_in_thought: whether the prompt ends inside a thought.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    is_forced: bool = False
    parallel: bool = True
    starts_in_thought: bool = False


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A request as the model takes it. Plain data, built once.

    token_ids: (tokens,) int32. spans: its media, in order; each is encoded at once.
    positions: (3, tokens) int32 for families with M-RoPE; after the prompt, token n has position
    n + `rope_delta`. snapshot_points: the token counts, ascending, after which a state is stored,
    for families whose states can't be cut. The first `atomic_prefill_tokens`, for families where
    tokens attend to later ones, are prefilled in one chunk or all cached; token_types: (tokens,)
    int32, is then 1 for media tokens and 0 for text. The answer follows `grammar`, if there is one,
    and is read as `answer_format` says; without one, all of its text is content. prediction: token
    ids that the answer is expected to be like. images: those of the messages, as the model sees
    them. text: what ids that were given read as, if they are to be
    counted only.
    """

    token_ids: NDArray[np.int32]
    spans: tuple[MediaSpan, ...] = ()
    positions: NDArray[np.int32] | None = None
    rope_delta: int = 0
    snapshot_points: tuple[int, ...] = ()
    atomic_prefill_tokens: int = 0
    token_types: NDArray[np.int32] | None = None
    grammar: Grammar | None = None
    cache_salt: str = ""
    answer_format: AnswerFormat | None = AnswerFormat()
    prediction: tuple[int, ...] = ()
    images: tuple[ImageUse, ...] = ()
    text: str = ""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_atomic(self) -> bool:
        """Whether all is prefilled in one chunk: then no other prompt can reuse its KV."""
        return self.atomic_prefill_tokens == self.num_tokens

    @property
    def key(self) -> PromptKey:
        return PromptKey(self.token_ids, self.spans)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a `Preparer` made of a request. Its receiver owns `holds`, and releases them once.

    inputs: what the processor made of each span that no cache had, by its place in `prompt.spans`.
    load: what the disk has, if anything; what it `covers` has no inputs.
    """

    prompt: PreparedPrompt
    holds: CacheHolds
    inputs: Mapping[int, MediaInputs] = field(default_factory=dict)
    load: DiskLoad | None = None


# ---- plans -------------------------------------------------------------------------------


class SeqId(NamedTuple):
    """A sequence of the decode batch: one choice of a request."""

    request_id: str
    choice: int = 0


@dataclass(frozen=True, slots=True)
class PrepareWork:
    """Prepare a request, unless it is cancelled; as if there were no disk without `use_disk`."""

    submit: Submit
    cancellation: Cancellation
    use_disk: bool = True


@dataclass(frozen=True, slots=True)
class LoadWork:
    """Read what the disk has of a request's prompt, unless it is cancelled."""

    request_id: str
    load: DiskLoad
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
    def num_tokens(self) -> int:
        return self.span.end - self.span.start

    @property
    def size(self) -> tuple[object, ...]:
        """What media that are encoded in one call have in common.

        How many tokens, the shape of every input, and the numbers of those that are no pixels.
        """
        inputs = (
            (name, array.shape, array.tobytes() if array.dtype.kind == "i" else None)
            for name, array in self.inputs.items()
        )
        return (self.num_tokens, *inputs)


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that the runner meets for the first time in this plan.

    Its prefill starts after `prefix`. features: those of the spans after it, in order. Both may be
    evicted once the step is done.
    """

    request_id: str
    prompt: PreparedPrompt
    sampling: SamplingParams
    prefix: Prefix
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
    """All that one step does.

    For the other threads: `prepare` these requests, `load` what the disk has of one, `encode` these
    media now, in one call, and `encode_next` once the step is launched. For the runner: drop
    `finished_seqs`, add `new`, decode these sequences, and `prefill` a chunk of one prompt, which
    may be the new one. A sequence may finish before it decoded: then its prompt is dropped.
    `refused` requests never fit into device memory.

    The rest is for the loop: whether there are requests at all, whether one waits for memory,
    whether one that does not waits for its first token. `is_drained`: no request is left, and none
    will be taken. `is_idle`: nothing is remembered of any request.
    """

    prepare: tuple[PrepareWork, ...] = ()
    load: LoadWork | None = None
    encode: tuple[EncodeWork, ...] = ()
    encode_next: tuple[EncodeWork, ...] = ()
    finished_seqs: tuple[SeqId, ...] = ()
    new: tuple[NewRequest, ...] = ()
    decode: tuple[SeqId, ...] = ()
    prefill: PrefillWork | None = None
    refused: Mapping[str, RequestError] = field(default_factory=dict)
    has_requests: bool = False
    waits_for_memory: bool = False
    waits_for_first_token: bool = False
    is_drained: bool = False
    is_idle: bool = True

    @property
    def has_runner_work(self) -> bool:
        return bool(self.finished_seqs or self.new or self.decode or self.prefill)


@dataclass(frozen=True, slots=True)
class TokenScore:
    """How likely a token was, and the likeliest ones, (token id, log probability) each.

    Probabilities are the model's own, before temperature, penalties and bias.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class DraftCounts(NamedTuple):
    """Draft tokens that a step verified for a sequence: how many there were, and were right."""

    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought: tokens that are known by now, and requests that failed alone.

    A request that is among the failures fails with all its sequences. `logprobs` holds an entry for
    each token whose request asked for them. A runner may run one step ahead: a token may belong to
    the step before, and a sequence's token may be missing in the step that launched it; its first
    comes with its prompt's last chunk, or later. A step that verified draft tokens of a sequence
    (`drafts`) may bring it several: those that were right, and one more at the end. `error` is what
    the model or the device raised, if they did.
    """

    tokens: Mapping[SeqId, Sequence[int]] = field(default_factory=dict)
    failures: Mapping[str, RequestError] = field(default_factory=dict)
    logprobs: Mapping[SeqId, Sequence[TokenScore]] = field(default_factory=dict)
    drafts: Mapping[SeqId, DraftCounts] = field(default_factory=dict)
    prefill_seconds: float = 0.0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Device memory in bytes: held by arrays, freed and kept for reuse, and what may be used."""

    active_bytes: int
    pool_bytes: int
    limit_bytes: int


class Step(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Wait for what it brings. To be called once, before the next launch."""
        ...


class PrepareExecutor(Protocol):
    """Runs a `Preparer` on threads, and posts what it makes into the engine's inbox."""

    @property
    def num_tracked(self) -> int: ...

    def start(self, work: PrepareWork) -> None: ...


class LoadExecutor(Protocol):
    """Reads from disk on a thread, and posts what it read into the engine's inbox."""

    def start(self, work: LoadWork) -> None: ...


class EncodeExecutor(Protocol):
    """Runs the vision encoder on a thread, and posts its features into the engine's inbox."""

    def start(self, works: Sequence[EncodeWork]) -> None:
        """Media of one size, to be encoded in one call."""
        ...


class Runner(Protocol):
    """Does what a plan says with the model. All calls come from one thread."""

    @property
    def num_tracked(self) -> int:
        """Prompts and sequences that hold device memory."""
        ...

    def launch(self, plan: SchedulerOutput) -> Step:
        """Begin the runner's part of `plan`; returns as soon as the device has its work."""
        ...

    def kv_bytes(self, num_tokens: int) -> int:
        """Device memory of the state of one sequence of so many tokens; 0 before the first."""
        ...


class Encoder(Protocol):
    """Turns media into features. All calls come from one thread, beside the runner's."""

    def encode(self, works: Sequence[EncodeWork]) -> Sequence[EncodedImage]:
        """The features of media of one size, in order, each as if it were encoded alone.

        Raises RequestError for what one of them gets wrong: all are as if not encoded.
        """
        ...


class Preparer(Protocol):
    """Turns a request into token ids and pixel arrays. Called from several threads."""

    def prepare(
        self, submit: Submit, cancellation: Cancellation, *, use_disk: bool = True
    ) -> Prepared:
        """Raises RequestError for what this request alone gets wrong, and Cancelled."""
        ...

    @property
    def num_tracked(self) -> int:
        """Media that somebody works on, or waits for."""
        ...


class DeviceMemory(Protocol):
    """The device's allocator. All calls come from the runner's thread."""

    @property
    def device_bytes(self) -> int:
        """All that the device has."""
        ...

    @property
    def trims_own_pool(self) -> bool:
        """Whether it frees what it keeps for reuse by itself before it exceeds its limit."""
        ...

    def read(self) -> MemoryReading: ...

    def set_limit(self, limit_bytes: int) -> None:
        """Device memory is to be so large from now on; nothing is freed for that."""
        ...

    def take_peak(self) -> int:
        """The most bytes that arrays held since the last call."""
        ...

    def settle(self) -> None:
        """Wait until what is under way is done: it may hold memory that was released."""
        ...

    def clear(self) -> None:
        """Give what is kept for reuse back to the system, once what is under way is done."""
        ...

    def device_used_bytes(self) -> int:
        """What all programs use, as the driver says; 0 if device memory is the machine's.

        Asks the driver, which takes time.
        """
        ...


class ProcessMemory(Protocol):
    """The process as the system sees it."""

    def footprint_bytes(self) -> int:
        """What the system counts for the process."""
        ...

    def trim(self) -> None:
        """Give free host memory back to the system; takes milliseconds."""
        ...
