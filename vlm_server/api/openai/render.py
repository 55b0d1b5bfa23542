"""Renders the engine's events as OpenAI's chat completions and chunks."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType

from vlm_server import protocol
from vlm_server.api.http import openai_errors as errors
from vlm_server.api.http import sse
from vlm_server.api.openai.options import Options
from vlm_server.errors import RequestError


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct, frozen=True):
    """`bytes` is `token` in UTF-8."""

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
class ChatRenderer:
    """The JSON of one answer: a whole completion, or its chunks."""

    id: str
    model: str
    options: Options
    created: int = field(default_factory=lambda: int(time.time()))
    _begun: set[int] = field(default_factory=set)
    """Choices of which a chunk was sent."""

    def whole(
        self, choices: Sequence[Sequence[protocol.Delta]], finished: protocol.Finished
    ) -> bytes:
        """The whole answer."""
        answers = tuple(_choice(index, deltas) for index, deltas in enumerate(choices))
        usage = _usage(finished.usage)
        return _encode(Completion(self.id, self.created, self.model, answers, usage))

    def delta(self, delta: protocol.Delta) -> bytes:
        """Up to three chunks: the role, the text, the finish reason."""
        chunks = []
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            chunks.append(ChunkChoice(Delta(role="assistant", content=""), index=delta.choice))
        if delta.text or delta.logprobs:
            chunks.append(
                ChunkChoice(
                    Delta(content=delta.text),
                    index=delta.choice,
                    logprobs=_logprobs(delta.logprobs),
                )
            )
        if delta.finish_reason:
            chunks.append(ChunkChoice(Delta(), delta.finish_reason, delta.choice))
        return b"".join(sse.event(self._chunk(chunk)) for chunk in chunks)

    def end(self, finished: protocol.Finished) -> bytes:
        """The usage, if the client wants it, and `[DONE]`."""
        if not self.options.include_usage:
            return sse.DONE
        chunk = Chunk(self.id, self.created, self.model, (), _usage(finished.usage))
        return sse.event(_encode(chunk)) + sse.DONE

    def error(self, error: RequestError) -> bytes:
        """An event with the error, and no `[DONE]`."""
        return sse.event(errors.encode(error))

    def _chunk(self, choice: ChunkChoice) -> bytes:
        usage = None if self.options.include_usage else UNSET
        return _encode(Chunk(self.id, self.created, self.model, (choice,), usage))


_encode = msgspec.json.Encoder().encode

_IMPOSSIBLE = -9999.0
"""OpenAI's value for minus infinity, which JSON does not have."""


def _choice(index: int, deltas: Sequence[protocol.Delta]) -> Choice:
    """A whole choice; its last delta has the finish reason."""
    finish_reason = deltas[-1].finish_reason
    assert finish_reason is not None
    text = "".join(delta.text for delta in deltas)
    logprobs = [entry for delta in deltas for entry in delta.logprobs]
    return Choice(AnswerMessage(text), finish_reason, index, _logprobs(logprobs))


def _logprobs(entries: Sequence[protocol.TokenLogprob]) -> Logprobs | None:
    """None without entries, that is, if they were not requested."""
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
