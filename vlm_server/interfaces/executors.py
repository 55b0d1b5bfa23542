"""Who does what a plan says: on the inference thread, and on the threads beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vlm_server.cache.caches import EncodedImage
from vlm_server.interfaces.prompts import Prepared, PreparedPrompt
from vlm_server.interfaces.step import (
    EncodeWork,
    LoadWork,
    PrepareWork,
    SchedulerOutput,
    StepResult,
)
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.protocol import Submit


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
    """Runs the vision encoder, and posts its features into the engine's inbox."""

    def start(self, works: Sequence[EncodeWork]) -> None:
        """Media of one size, to be encoded in one call."""
        ...

    @property
    def needs_turns(self) -> bool:
        """Whether it goes on with its work only in `take_turn`."""
        ...

    def take_turn(self, *, is_alone: bool, is_long: bool) -> None:
        """Launch a part of the work, if there is any.

        is_alone: whether there was no step. is_long: whether a prompt was read beside sequences
        that decode; it may be better to wait for the next step then.
        """
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

    def settle(self) -> None:
        """Wait for all that sequences compute, where a device tells errors late.

        So that what comes next is not blamed for them, or they for it.
        """
        ...

    def kv_bytes(self, num_tokens: int) -> int:
        """Device memory of the KV of one sequence of `num_tokens`; 0 before the first prompt."""
        ...

    def tokens_beside(self, prompt: PreparedPrompt, num_seqs: int) -> int:
        """How many tokens of `prompt` a step reads in the pass in which `num_seqs` decode.

        0 if it reads them by themselves, after that pass.
        """
        ...

    def plan_ahead(self) -> bool:
        """Do some work now, briefly, that prompts would wait for later. False if none is left."""
        ...


class Encoding(Protocol):
    """Media of one size that are being encoded."""

    def advance(self) -> bool:
        """Launch the next part, and wait for the one before. False if that was the last.

        Raises RequestError.
        """
        ...

    def result(self) -> Sequence[EncodedImage]:
        """Wait for the features, in order. Raises RequestError, as `Encoder.encode`."""
        ...


class Encoder(Protocol):
    """Turns media into features. All calls come from one thread."""

    def begin(self, works: Sequence[EncodeWork]) -> Encoding:
        """The same as `encode`, part by part. Raises RequestError."""
        ...

    def encode(self, works: Sequence[EncodeWork]) -> Sequence[EncodedImage]:
        """The features of media of one size, in order, each as if it were encoded alone.

        Raises RequestError if one of them is wrong; then none counts as encoded.
        """
        ...


class Preparer(Protocol):
    """Turns a request into token ids and pixel arrays. Called from several threads."""

    def prepare(
        self, submit: Submit, cancellation: Cancellation, *, use_disk: bool = True
    ) -> Prepared:
        """Raises RequestError if the request is wrong, which affects no other, and Cancelled."""
        ...

    @property
    def num_tracked(self) -> int:
        """Media items that a thread works on, or waits for."""
        ...
