"""The scheduler's configuration: the limits of one model on one machine."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from vlm_server.engine.output.formats import NO_FORMATS, Formats
from vlm_server.errors import ContextLengthExceeded, InvalidRequest
from vlm_server.interfaces import PreparedPrompt
from vlm_server.interfaces.model_spec import VectorSpec
from vlm_server.protocol import Pooling, SamplingParams, Submit

_OWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What a checkpoint sets the default of."""
INPUT_TYPES = ("query", "document")
"""Input types that every embedding model takes, whether it has prompts for them or not."""
TYPICAL_TOKENS = 4096
"""Tokens of a typical prompt and its answer: a conversation with some images."""
_FLOAT_BYTES = 4
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
    default_sampling: SamplingParams
    """The checkpoint's own sampling: values for `_OWN`."""
    formats: Formats = NO_FORMATS
    """The formats of the model's tool calls and reasoning."""
    max_images_per_encode: int = 1
    """1 for a model that takes one image, or frame group of a video, at a time."""
    encodes_in_turns: bool = False
    """Whether an encode advances between steps, so that it may begin before a last chunk."""
    max_inner_points: int = 0
    """See `TextModel.max_inner_points`."""
    max_prompts_per_prefill: int = 1
    """1 for a model whose prompts can't be prefilled in one batch."""
    family: str = ""
    """The model's family, for messages."""
    writes: bool = True
    """Whether the model answers in words."""
    vectors: VectorSpec | None = None
    """The vectors of a model that embeds; None for one that does not."""
    scores_pairs: bool = False
    """Whether the model scores documents with their query, and not by vectors."""
    batches_options: bool = True
    """Whether several options of a question may be scored in one call."""
    batches_lengths: bool = True
    """Whether inputs of different lengths may be embedded in one batch."""

    def check_task(self, submit: Submit) -> None:
        """Raises InvalidRequest for a request that this model does not serve."""
        if submit.count_only:
            return
        if submit.pooling is not None:
            self._check_pooling(submit.pooling)
        elif not self.writes:
            made, where = ("scores", "/v1/rerank")
            if self.vectors is not None:
                made, where = ("vectors", "/v1/embeddings or /v1/rerank")
            raise InvalidRequest(
                f"This model ({self.family}) makes {made} and writes no answers: send it to "
                f"{where}, or name a model that writes.",
                "model",
            )

    @property
    def logit_bytes(self) -> int:
        """Device memory for the logits of one token, as the model makes them and in float32."""
        return 3 * _FLOAT_BYTES * self.vocabulary_size

    def _check_pooling(self, pooling: Pooling) -> None:
        vectors = self.vectors
        if pooling.task == "decide":
            if self.writes:
                return
            raise InvalidRequest(
                f"This model ({self.family}) writes no answers, so that it can't decide: name a "
                "model that writes.",
                "model",
            )
        if vectors is None:
            if pooling.task == "score" and self.scores_pairs:
                return
            does = "writes answers" if self.writes else "makes scores"
            lacks = "vectors" if pooling.task == "embed" else "vectors or scores"
            raise InvalidRequest(
                f"This model ({self.family}) {does} and makes no {lacks}: name an embedding model.",
                "model",
            )
        if pooling.dimensions is not None and pooling.dimensions > vectors.dimensions:
            raise InvalidRequest(
                f"This model's vectors have {vectors.dimensions} dimensions; `dimensions` may ask "
                "for fewer, not for more.",
                "dimensions",
            )
        known = {*INPUT_TYPES, *vectors.prompts}
        if pooling.input_type and pooling.input_type not in known:
            raise InvalidRequest(
                f"This model knows the input types {', '.join(sorted(known))}.", "input_type"
            )

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raises InvalidRequest for sampling parameters that this engine can't apply."""
        if any(not 0 <= token_id < self.vocabulary_size for token_id in sampling.logit_bias):
            last = self.vocabulary_size - 1
            message = f"This model's token ids run from 0 to {last}; the bias names another one."
            raise InvalidRequest(message, "logit_bias")
        if sampling.n > self.max_num_seqs:
            message = (
                f"This server decodes at most {self.max_num_seqs} choices in one batch "
                "(scheduler.max_num_seqs)."
            )
            raise InvalidRequest(message, "n")

    def with_defaults(self, sampling: SamplingParams) -> SamplingParams:
        """`sampling` with the checkpoint's own values for what it leaves open."""
        left_open = [name for name in _OWN if getattr(sampling, name) is None]
        own = {name: getattr(self.default_sampling, name) for name in left_open}
        return msgspec.structs.replace(sampling, **own)

    def max_answer_tokens(self, prompt: PreparedPrompt, max_tokens: int | None) -> int:
        """The maximum length of the answer: `max_tokens`, or the rest of the context if less.

        Raises ContextLengthExceeded if the prompt leaves no room.
        """
        room = self.context_tokens - prompt.num_tokens
        if room < 1:
            raise ContextLengthExceeded.of_prompt(
                self.context_tokens,
                f"{prompt.num_tokens} tokens > {self.context_tokens - 1} maximum. "
                f"{_advice(prompt)}",
                prompt.param,
            )
        return min(max_tokens or room, room)

    def check_length(self, prompt: PreparedPrompt) -> None:
        """Raises ContextLengthExceeded for an input with more tokens than the model can embed."""
        if prompt.num_tokens > self.context_tokens:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.context_tokens} tokens, and this "
                f"input has {prompt.num_tokens}. Send a shorter text, or smaller images.",
                prompt.param,
            )


def _advice(prompt: PreparedPrompt) -> str:
    """How to make `prompt` shorter."""
    if not prompt.documents:
        return "Send fewer or shorter messages, or smaller images."
    num_pages = sum(len(document.pages) for document in prompt.documents)
    num_tokens = sum(document.tokens for document in prompt.documents)
    return (
        f"The {num_pages} pages of its documents have {num_tokens} of them as images: ask about "
        "fewer (`pages`), or smaller ones (`max_pixels`), or without `include_text`."
    )
