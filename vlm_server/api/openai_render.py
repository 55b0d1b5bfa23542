"""Answers in OpenAI's shapes. Knows text, counts and a finish; knows no HTTP, no stream."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType

from vlm_server import protocol


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct, frozen=True):
    """`bytes` are those of `token` as UTF-8."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


class TokenLogprob(TopLogprob, frozen=True):
    top_logprobs: tuple[TopLogprob, ...]


class Logprobs(msgspec.Struct, frozen=True):
    content: tuple[TokenLogprob, ...]
    refusal: None = None


class Delta(msgspec.Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    delta: Delta
    finish_reason: str | None = None
    index: int = 0
    logprobs: Logprobs | None = None


class Chunk(msgspec.Struct, frozen=True, tag_field="object", tag="chat.completion.chunk"):
    id: str
    created: int
    model: str
    choices: tuple[ChunkChoice, ...]
    usage: Usage | UnsetType | None = UNSET


class AnswerMessage(msgspec.Struct, frozen=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class Choice(msgspec.Struct, frozen=True):
    message: AnswerMessage
    finish_reason: str
    index: int = 0
    logprobs: Logprobs | None = None


class Completion(msgspec.Struct, frozen=True, tag_field="object", tag="chat.completion"):
    id: str
    created: int
    model: str
    choices: tuple[Choice, ...]
    usage: Usage


@dataclass(frozen=True, slots=True)
class Renderer:
    """One answer's JSON: whole, or chunk by chunk."""

    id: str
    model: str
    include_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(
        self, text: str, logprobs: Sequence[protocol.TokenLogprob], finished: protocol.Finished
    ) -> bytes:
        choice = Choice(AnswerMessage(text), finished.finish_reason, logprobs=_logprobs(logprobs))
        usage = _usage(finished.usage)
        return _encode(Completion(self.id, self.created, self.model, (choice,), usage))

    def role(self) -> bytes:
        return self._chunk(ChunkChoice(Delta(role="assistant", content="")))

    def text(self, delta: protocol.Delta) -> bytes:
        logprobs = _logprobs(delta.logprobs)
        return self._chunk(ChunkChoice(Delta(content=delta.text), logprobs=logprobs))

    def finish(self, finished: protocol.Finished) -> bytes:
        return self._chunk(ChunkChoice(Delta(), finish_reason=finished.finish_reason))

    def usage(self, finished: protocol.Finished) -> bytes:
        return _encode(Chunk(self.id, self.created, self.model, (), _usage(finished.usage)))

    def _chunk(self, choice: ChunkChoice) -> bytes:
        usage = None if self.include_usage else UNSET
        return _encode(Chunk(self.id, self.created, self.model, (choice,), usage))


_encode = msgspec.json.Encoder().encode

_IMPOSSIBLE = -9999.0
"""OpenAI's number for a logarithm that JSON cannot hold."""


def _logprobs(entries: Sequence[protocol.TokenLogprob]) -> Logprobs | None:
    """None without entries: nobody asked for them."""
    if not entries:
        return None
    return Logprobs(
        tuple(
            TokenLogprob(*_shown(entry.token), tuple(TopLogprob(*_shown(top)) for top in entry.top))
            for entry in entries
        )
    )


def _shown(token: protocol.TokenText) -> tuple[str, float, tuple[int, ...]]:
    logprob = token.logprob if math.isfinite(token.logprob) else _IMPOSSIBLE
    return token.text, logprob, tuple(token.text.encode("utf-8"))


def _usage(usage: protocol.Usage) -> Usage:
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(usage.cached_tokens),
    )
