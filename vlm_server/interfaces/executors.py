"""The interfaces of a plan's executors: runner, encoder and preparer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vlm_server.cache.caches import EncodedImage
from vlm_server.interfaces.prompts import Prepared, PreparedPrompt
from vlm_server.interfaces.step import EncodeWork, SchedulerOutput, StepResult
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.protocol import Submit


class Step(Protocol):
    """A launched step."""

    def result(self) -> StepResult:
        """Wait for the step's result. To be called once, before the next launch."""


class EncodeExecutor(Protocol):
    """An executor of encodes, which posts the features into the engine's inbox."""

    def start(self, encodes: Sequence[EncodeWork]) -> None:
        """Begin to encode media of one size in one call."""

    @property
    def has_parts_left(self) -> bool:
        """Whether parts of an encode are left for `advance_encode`."""

    def advance_encode(self, *, is_alone: bool) -> None:
        """Launch the next part of an encode, if any; is_alone: whether no step preceded."""


class Runner(Protocol):
    """The model's part of a plan. All calls come from one thread."""

    @property
    def num_tracked(self) -> int:
        """Prompts and sequences that hold device memory."""

    def launch(self, plan: SchedulerOutput) -> Step:
        """Begin the runner's part of `plan`; returns as soon as the device has the work."""

    def synchronize(self) -> None:
        """Wait for all launched work, on devices that report errors late.

        Errors are thus attributed to the work that caused them.
        """

    def kv_bytes(self, num_tokens: int) -> int:
        """Device memory in bytes of one sequence's KV; 0 before the first prompt."""

    def max_piggybacked_tokens(self, prompt: PreparedPrompt, num_seqs: int) -> int:
        """The size of a piggybacked chunk of `prompt` in a mixed step with `num_seqs` sequences.

        0 if the chunk must run alone, after the decode pass.
        """

    def precompile_next(self) -> bool:
        """Compile one more shape that later prompts may have; False if none is left."""


class EncodeCall(Protocol):
    """An encode under way, of media of one size."""

    def advance(self) -> bool:
        """Launch the next part, and wait for the previous one. False if that was the last.

        Raises RequestError.
        """

    def result(self) -> Sequence[EncodedImage]:
        """Wait for the features, in order. Raises RequestError, as `Encoder.begin`."""


class Encoder(Protocol):
    """The vision encoder: media to features. All calls come from one thread."""

    def begin(self, encodes: Sequence[EncodeWork]) -> EncodeCall:
        """Begin to encode media of one size, with the same results as one by one.

        Raises RequestError if any is invalid; then none is encoded.
        """


class Preparer(Protocol):
    """The preparation of requests: token ids and pixel arrays. Called from several threads."""

    def prepare(
        self, submit: Submit, cancellation: Cancellation, *, use_disk: bool = True
    ) -> Prepared:
        """Prepare a request. Raises RequestError if it is invalid, and Cancelled."""

    @property
    def num_tracked(self) -> int:
        """The number of media items in preparation."""
