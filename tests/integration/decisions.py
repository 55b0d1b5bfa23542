"""Requests for decisions, and the log probabilities of options that chunks of a prompt give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from msgspec import structs
from tokenizers import Tokenizer, normalizers

from tests.integration.harness import EngineHarness, Part, conversation
from vlm_server.cache.references import CacheReferences
from vlm_server.interfaces import EncodeWork, NewRequest, PreparedPrompt
from vlm_server.interfaces.model_spec import ModelSpec
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.protocol import (
    Decision,
    Message,
    Pooling,
    PoolingInput,
    SamplingParams,
    Submit,
    TextPart,
)
from vlm_server.runner.prefill.prefill import Prefill

NOT_CANCELLED = Cancellation()
OPTIONS = ("red", "r", "red apple", "blue", "a colour that has no name at all", "?")


@dataclass(frozen=True)
class Asked:
    """A question and its options."""

    text: str
    options: Sequence[str] = OPTIONS
    num_spellings: int = 1


def without_case(spec: ModelSpec) -> Tokenizer:
    """The tokenizer of a model, to which upper and lower case are the same."""
    tokenizer = Tokenizer.from_str(spec.backend.to_str())
    tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def decide(request_id: str, parts: Sequence[Part], *questions: Asked) -> Submit:
    """Questions about one user's message of texts and images."""
    return structs.replace(
        conversation(request_id, ("user", parts), sampling=SamplingParams()),
        pooling=Pooling("decide"),
        inputs=tuple(
            PoolingInput(
                (Message("user", (TextPart(asked.text),), param=f"questions.{i}"),),
                param=f"questions.{i}",
                options=tuple(asked.options),
                num_spellings=asked.num_spellings,
            )
            for i, asked in enumerate(questions)
        ),
    )


def decisions_of(engine: EngineHarness, submit: Submit) -> tuple[Decision, ...]:
    """The decisions of a request, after it has run to its end."""
    end = engine.finish(submit)
    return end.decisions


def logprobs_in_chunks(
    engine: EngineHarness, parts: Sequence[Part], prompt: PreparedPrompt, option: tuple[int, ...]
) -> tuple[list[float], float, float]:
    """Log probabilities of an option's tokens, of any end token after them, and of the likeliest.

    The option continues the prompt token by token, as chunks of one longer prompt.
    """
    prefill = Prefill(engine.loaded, _request(engine, parts, _continued(prompt, option)))
    start, tokens = prompt.num_tokens, list[float]()
    logprobs = _logprobs(prefill.launch(0, start))
    for i, token_id in enumerate(option):
        tokens.append(float(logprobs[token_id]))
        logprobs = _logprobs(prefill.launch(start + i, start + i + 1))
    ends = logprobs[[i for i in engine.loaded.spec.eos_token_ids if i < len(logprobs)]]
    return tokens, float(np.log(np.exp(ends.astype(np.float64)).sum())), float(ends.max())


def _logprobs(logits: mx.array) -> np.ndarray:
    logits = logits.astype(mx.float32)
    return np.array((logits - mx.logsumexp(logits, axis=-1, keepdims=True))[0])


def _continued(prompt: PreparedPrompt, option: tuple[int, ...]) -> PreparedPrompt:
    count, start = len(option), prompt.num_tokens
    positions, token_types = prompt.positions, prompt.token_types
    if positions is not None:
        more = np.arange(start, start + count, dtype=np.int32) + prompt.rope_delta
        positions = np.concatenate([positions, np.tile(more, (3, 1))], axis=1)
    if token_types is not None:
        token_types = np.concatenate([token_types, np.zeros(count, np.int32)])
    token_ids = np.concatenate([prompt.token_ids, np.array(option, dtype=np.int32)])
    return replace(
        prompt, token_ids=token_ids, positions=positions, token_types=token_types, options=()
    )


def _request(engine: EngineHarness, parts: Sequence[Part], prompt: PreparedPrompt) -> NewRequest:
    """`prompt` with the features of the images among `parts`, and no cached prefix."""
    asked = engine.preparer.prepare(conversation("media", ("user", parts)), NOT_CANCELLED)
    works = [EncodeWork("media", i, prompt, asked.inputs[i]) for i in range(len(prompt.spans))]
    encoder = engine.encoder.encoder
    features = tuple(encoder.begin([work]).result()[0] for work in works)
    asked.references.release()
    references = CacheReferences(engine.caches, prompt.key, prompt.prefix_salt, 0)
    return NewRequest("alone", prompt, SamplingParams(), references.prefix, features)
