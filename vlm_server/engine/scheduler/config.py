"""The scheduler's configuration: the limits of one model on one machine."""

from __future__ import annotations

from dataclasses import dataclass

from vlm_server.engine.output.formats import NO_FORMATS, Formats

TYPICAL_TOKENS = 4096
"""Tokens of a typical prompt and its answer: a conversation with some images."""
_MIN_SEQS = 16
"""Applies however little memory there is: prompts may be short, and admission knows their size."""
_MAX_SEQS = 256


def suitable_num_seqs(free_bytes: int, seq_bytes: int) -> int:
    """The size of the decode batch that suits `free_bytes`, for sequences of `seq_bytes` each.

    Sequences get half of the memory, since they are copied when another one joins. This is no
    promise: each request is admitted by its real needs.
    """
    return max(_MIN_SEQS, min(_MAX_SEQS, free_bytes // 2 // max(1, seq_bytes)))


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
    """The formats of the model's tool calls and reasoning."""
    max_images_per_encode: int = 1
    """1 for a model that takes one image, or frame group of a video, at a time."""
    max_prompts_per_prefill: int = 1
    """1 for a model whose prompts can't be prefilled in one batch."""
