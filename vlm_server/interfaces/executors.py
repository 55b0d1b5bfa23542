"""The executors of a plan: on the inference thread, and on the threads beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vlm_server.cache.caches import EncodedImage
from vlm_server.interfaces.prompts import Prepared, PreparedPrompt
from vlm_server.interfaces.step import (
    EncodeWork,
    SchedulerOutput,
    StepResult,
)
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.protocol import Submit


class Step(Protocol):
    """A launched step."""

    def result(self) -> StepResult:
        """Wait for the step's result. To be called once, before the next launch."""
        ...


class EncodeExecutor(Protocol):
    """Runs the vision encoder, and posts its features into the engine's inbox."""

    def start(self, works: Sequence[EncodeWork]) -> None:
        """Encode media of one size in one call."""
        ...

    @property
    def needs_turns(self) -> bool:
        """Whether encoding advances only in `advance_encode`."""
        ...

    def advance_encode(self, *, is_alone: bool, is_long: bool) -> None:
        """Launch the next part of an encode, if there is any.

        is_alone: whether there was no step. is_long: whether the step was a mixed one; it may be
        better to wait for the next step then.
        """
        ...


class Runner(Protocol):
    """The model's part of a plan. All calls come from one thread."""

    @property
    def num_tracked(self) -> int:
        """Prompts and sequences that hold device memory."""
        ...

    def launch(self, plan: SchedulerOutput) -> Step:
        """Begin the runner's part of `plan`; returns as soon as the device has the work."""
        ...

    def synchronize(self) -> None:
        """Wait for all work of sequences, on devices that report errors late.

        Later work is then not blamed for their errors, nor they for its.
        """
        ...

    def kv_bytes(self, num_tokens: int) -> int:
        """Device memory in bytes of one sequence's KV; 0 before the first prompt."""
        ...

    def max_piggybacked_tokens(self, prompt: PreparedPrompt, num_seqs: int) -> int:
        """The size of a piggybacked chunk of `prompt` in a mixed step with `num_seqs` sequences.

        0 if the chunk must run alone, after the decode pass.
        """
        ...

    def precompile_next(self) -> bool:
        """Compile one more shape that later prompts may have; False if none is left."""
        ...


class EncodeCall(Protocol):
    """Media of one size that are being encoded."""

    def advance(self) -> bool:
        """Launch the next part, and wait for the one before. False if that was the last.

        Raises RequestError.
        """
        ...

    def result(self) -> Sequence[EncodedImage]:
        """Wait for the features, in order. Raises RequestError, as `Encoder.begin`."""
        ...


class Encoder(Protocol):
    """The vision encoder: media to features. All calls come from one thread."""

    def begin(self, works: Sequence[EncodeWork]) -> EncodeCall:
        """Begin to encode media of one size, each as if it were encoded alone.

        Raises RequestError if one of them is wrong; then none counts as encoded.
        """
        ...


class Preparer(Protocol):
    """The preparation of requests: token ids and pixel arrays. Called from several threads."""

    def prepare(
        self, submit: Submit, cancellation: Cancellation, *, use_disk: bool = True
    ) -> Prepared:
        """Raises RequestError if the request is wrong, which affects no other, and Cancelled."""
        ...

    @property
    def num_tracked(self) -> int:
        """Media items in work by a thread, or waited for."""
        ...
