"""The contracts between rooms. Knows token ids, numpy arrays and plans; knows no mlx, no HTTP.

`engine` decides and `runner` does: they meet only here. `api` reaches the engine process
through `EngineClient`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from vlm_server.errors import RequestError
from vlm_server.protocol import (
    Accepted,
    Failed,
    Finished,
    SamplingParams,
    Stats,
    Submit,
    Tokens,
)


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Tokens `start` to `end` (exclusive) of a prompt that are encoded at once.

    They stand for one picture, or for a stretch of one video.
    """

    start: int
    end: int
    mm_hash: str
    inputs: Mapping[str, NDArray[Any]]
    """What the processor made of it alone: `pixel_values`, grids and the like."""


CompiledGrammar = Any
"""What a `Preparer` made of a request's JSON schema: only `runner` can read it."""


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A request as the runner takes it: token_ids (tokens,) int32, and its spans in order.

    `grids` has a row for each picture (`image_grid_thw`) and each video (`video_grid_thw`), for
    families whose positions follow from them.
    The answer follows `grammar`, if there is one.
    """

    token_ids: NDArray[np.int32]
    images: tuple[ImageSpan, ...] = ()
    grids: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    grammar: CompiledGrammar | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


EncodedImage = Any
"""What an `Encoder` made of one picture: device arrays that only `runner` can read."""


class RowId(NamedTuple):
    """A row of the decode batch: one choice of a request."""

    request_id: str
    choice: int = 0


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that the runner meets for the first time in this plan."""

    request_id: str
    prompt: PreparedPrompt
    sampling: SamplingParams
    images: tuple[EncodedImage, ...] = ()


@dataclass(frozen=True, slots=True)
class EncodeWork:
    """Encode picture `image_index` of a request's prompt."""

    request_id: str
    image_index: int
    prompt: PreparedPrompt


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """Prefill tokens `start` to `end`; if `is_last`, sample and join the decode batch.

    All rows of the request, `sampling.n`, join at once.
    """

    request_id: str
    start: int
    end: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: forget `released`, meet `new`, decode the rows named, and one prompt's chunk.

    A row may be released before it joined: then its prompt is forgotten.
    """

    released: tuple[RowId, ...] = ()
    new: tuple[NewRequest, ...] = ()
    decode: tuple[RowId, ...] = ()
    prefill: PrefillWork | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.released or self.new or self.decode or self.prefill)


@dataclass(frozen=True, slots=True)
class TokenScore:
    """How likely a token was, and the likeliest ones, (token id, log probability) each.

    Probabilities are the model's own, before temperature, penalties and bias.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought: tokens that are known by now, and requests that failed alone.

    A request that is among the failures fails with all its rows.
    `logprobs` holds an entry for each token whose request asked for them. A runner may run
    one step ahead: a token may belong to the step before, and a row's token may be missing in
    the step that launched it. `error` is what the model or the device raised, if they did.
    """

    tokens: Mapping[RowId, int] = field(default_factory=dict)
    failures: Mapping[str, RequestError] = field(default_factory=dict)
    logprobs: Mapping[RowId, TokenScore] = field(default_factory=dict)
    prefill_seconds: float = 0.0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Device memory in bytes: held by arrays, kept for reuse, and the most ever held."""

    active_bytes: int
    pool_bytes: int
    peak_bytes: int


class Runner(Protocol):
    """Does what a plan says with the model. All calls come from one thread."""

    def execute(self, plan: SchedulerOutput) -> StepResult: ...


class Encoder(Protocol):
    """Turns pictures into features. All calls come from one thread, beside the runner's."""

    def encode(self, prompt: PreparedPrompt, image_index: int) -> EncodedImage:
        """Raises RequestError for what this picture alone gets wrong."""
        ...


class Preparer(Protocol):
    """Turns a request into token ids and pixel arrays. Called from several threads."""

    def prepare(self, submit: Submit) -> PreparedPrompt:
        """Raises RequestError for what this request alone gets wrong."""
        ...

    def abandon(self, request_id: str) -> None:
        """Nobody waits for this request any more: end what takes long. Unknown ids are no error."""
        ...


class MemoryProbe(Protocol):
    """Reads device memory. All calls come from the runner's thread."""

    def read(self) -> MemoryReading: ...


RequestEvent = Accepted | Tokens | Finished | Failed


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What the front knows of the engine process. `progress` is (stage, fraction) while loading."""

    state: str
    model_name: str
    pid: int | None = None
    restarts: int = 0
    progress: tuple[str, float] | None = None
    retry_after_seconds: float = 1.0
    stats: Stats | None = None

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"


class EngineClient(Protocol):
    """The front's view of an engine process, whichever incarnation of it runs."""

    @property
    def status(self) -> EngineStatus: ...

    def stream(self, submit: Submit) -> AsyncGenerator[RequestEvent, None]:
        """All events of one request, in order, the last of them terminal.

        `Tokens` events hold this request's delta alone. Closing the iterator early
        (`aclose`) aborts the request in the engine. Never raises RequestError while the
        engine lives; raises EngineUnavailable before anything was sent if it isn't ready,
        and yields `Failed(code="engine_died")` if it dies while the request is in flight.
        """
        ...
