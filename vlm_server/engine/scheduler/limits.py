"""The limits that one model on one machine sets to requests."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from vlm_server.engine.output.formats import NO_FORMATS, Formats
from vlm_server.errors import ContextLengthExceeded, InvalidRequest, RequestError
from vlm_server.interfaces import PreparedPrompt
from vlm_server.protocol import SamplingParams

TYPICAL_TOKENS = 4096
"""Of prompt and answer: a conversation with some pictures."""
_LEAST_SEQS = 16
"""However little memory there is: prompts may be shorter, and admission knows what they take."""
_MOST_SEQS = 256


def suitable_num_seqs(free_bytes: int, seq_bytes: int) -> int:
    """How many sequences of `seq_bytes` each may decode together in `free_bytes`.

    Half of the memory is for them: when one joins, those that run are copied. It is no promise:
    each request is admitted by what it really needs.
    """
    return max(_LEAST_SEQS, min(_MOST_SEQS, free_bytes // 2 // max(1, seq_bytes)))


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of one model on one machine; see the `scheduler` section of the settings."""

    max_num_seqs: int
    prefill_chunk_tokens: int
    max_step_seconds: float
    max_preparing: int
    context_tokens: int
    vocabulary_size: int
    eos_token_ids: frozenset[int]
    default_temperature: float
    default_top_p: float
    formats: Formats = NO_FORMATS
    """How the model writes tool calls and reasoning."""
    max_images_per_encode: int = 1
    """1 for a model that takes one image, or frame group of a video, at a time."""
    max_prompts_per_prefill: int = 1
    """1 for a model whose layers do not all only append."""

    def refusal(self, sampling: SamplingParams) -> RequestError | None:
        """The error of sampling parameters that can't be obeyed here; None if they can."""
        if any(not 0 <= token_id < self.vocabulary_size for token_id in sampling.logit_bias):
            last = self.vocabulary_size - 1
            message = f"This model's token ids run from 0 to {last}; the bias names another one."
            return InvalidRequest(message, "logit_bias")
        if sampling.n > self.max_num_seqs:
            message = (
                f"This server decodes at most {self.max_num_seqs} choices together "
                "(scheduler.max_num_seqs)."
            )
            return InvalidRequest(message, "n")
        return None

    def with_defaults(self, sampling: SamplingParams) -> SamplingParams:
        """`sampling` with the checkpoint's own temperature and top_p where it names none."""
        temperature, top_p = sampling.temperature, sampling.top_p
        return msgspec.structs.replace(
            sampling,
            temperature=self.default_temperature if temperature is None else temperature,
            top_p=self.default_top_p if top_p is None else top_p,
        )

    def room_for_answer(self, prompt: PreparedPrompt, max_tokens: int | None) -> int:
        """The most tokens of an answer: `max_tokens`, or what the context has room for.

        Raises ContextLengthExceeded if that is nothing.
        """
        room = self.context_tokens - prompt.num_tokens
        if room < 1:
            raise ContextLengthExceeded.of(
                self.context_tokens,
                f"{prompt.num_tokens} tokens > {self.context_tokens - 1} maximum. Send fewer or "
                "shorter messages, or smaller images.",
                prompt.param,
            )
        return min(max_tokens or room, room)
