"""Checks of a request's sampling parameters and prompt against the limits of the model."""

from __future__ import annotations

import msgspec

from vlm_server.engine.scheduler.config import SchedulerConfig
from vlm_server.errors import ContextLengthExceeded, InvalidRequest
from vlm_server.interfaces import PreparedPrompt
from vlm_server.protocol import SamplingParams


def check_sampling(config: SchedulerConfig, sampling: SamplingParams) -> None:
    """Raises InvalidRequest for sampling parameters that this engine can't apply."""
    if any(not 0 <= token_id < config.vocabulary_size for token_id in sampling.logit_bias):
        last = config.vocabulary_size - 1
        message = f"This model's token ids run from 0 to {last}; the bias names another one."
        raise InvalidRequest(message, "logit_bias")
    if sampling.n > config.max_num_seqs:
        message = (
            f"This server decodes at most {config.max_num_seqs} choices in one batch "
            "(scheduler.max_num_seqs)."
        )
        raise InvalidRequest(message, "n")


def with_defaults(config: SchedulerConfig, sampling: SamplingParams) -> SamplingParams:
    """`sampling` with the checkpoint's own temperature and top_p where it names none."""
    temperature, top_p = sampling.temperature, sampling.top_p
    return msgspec.structs.replace(
        sampling,
        temperature=config.default_temperature if temperature is None else temperature,
        top_p=config.default_top_p if top_p is None else top_p,
    )


def max_answer_tokens(
    config: SchedulerConfig, prompt: PreparedPrompt, max_tokens: int | None
) -> int:
    """The maximum length of the answer: `max_tokens`, or the rest of the context if less.

    Raises ContextLengthExceeded if the prompt leaves no room.
    """
    room = config.context_tokens - prompt.num_tokens
    if room < 1:
        raise ContextLengthExceeded.of_prompt(
            config.context_tokens,
            f"{prompt.num_tokens} tokens > {config.context_tokens - 1} maximum. Send fewer or "
            "shorter messages, or smaller images.",
            prompt.param,
        )
    return min(max_tokens or room, room)
