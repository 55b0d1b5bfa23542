"""OpenAI's chat and text completions and their chunks, made of the engine's events."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType

from vlm_server import protocol
from vlm_server.api.dialects.logprobs import TokenLogprob, finite, token_logprob
from vlm_server.api.dialects.openai.parse import Options
from vlm_server.api.http import errors, sse
from vlm_server.errors import RequestError


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Predictions are drafts, from wherever they come: see `docs/api.md`."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """`images` and `videos` are ours: what the model saw of each picture and video, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    images: tuple[protocol.ImageUse, ...] | UnsetType = UNSET
    videos: tuple[protocol.VideoUse, ...] | UnsetType = UNSET


class Logprobs(msgspec.Struct, frozen=True):
    content: tuple[TokenLogprob, ...]
    refusal: None = None


class Function(msgspec.Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, frozen=True):
    """The first delta of a call has all but its arguments."""

    index: int
    function: Function
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[ToolCallDelta, ...] | UnsetType = UNSET


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


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    function: Function
    type: str = "function"


class AnswerMessage(msgspec.Struct, frozen=True):
    """`content` is None for calls without text."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[ToolCall, ...] | UnsetType = UNSET


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
class ChunkRenderer:
    """The common part of chat and text completions."""

    id: str
    model: str
    options: Options
    created: int = field(default_factory=lambda: int(time.time()), kw_only=True)

    def usage_so_far(self, usage: protocol.Usage | None) -> Usage | UnsetType | None:
        """The field `usage` of a chunk that is not the last."""
        if self.options.continuous_usage and usage is not None:
            return usage_of(usage)
        return None if self.options.include_usage else UNSET

    def error(self, error: RequestError) -> bytes:
        """An event with the error, and no `[DONE]`."""
        return sse.event(errors.encode_openai(error))

    def keep_alive(self) -> bytes:
        return sse.KEEP_ALIVE


@dataclass(frozen=True, slots=True)
class ChatRenderer(ChunkRenderer):
    """The JSON of one answer: a whole completion, or its chunks."""

    _begun: set[int] = field(default_factory=set)
    """Choices of which a chunk was sent."""

    def whole(
        self, choices: Sequence[Sequence[protocol.Delta]], finished: protocol.Finished
    ) -> bytes:
        answers = tuple(_choice(index, deltas) for index, deltas in enumerate(choices))
        usage = usage_of(finished.usage, finished.images, finished.videos)
        return _encode(Completion(self.id, self.created, self.model, answers, usage))

    def delta(self, delta: protocol.Delta) -> bytes:
        """Chunks with the role, the text or the call, and the finish reason."""
        news = []
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            news.append(Delta(role="assistant", content=""))
        news += _news(delta)
        chunks = [ChunkChoice(each, index=delta.choice) for each in news]
        if delta.logprobs:
            chunks[-1] = msgspec.structs.replace(chunks[-1], logprobs=_logprobs(delta.logprobs))
        if delta.finish_reason:
            chunks.append(ChunkChoice(Delta(), delta.finish_reason, delta.choice))
        return b"".join(sse.event(self._chunk(chunk, delta.usage)) for chunk in chunks)

    def end(self, finished: protocol.Finished) -> bytes:
        """The usage, if the client wants it, and `[DONE]`."""
        if not self.options.include_usage:
            return sse.DONE
        usage = usage_of(finished.usage, finished.images, finished.videos)
        chunk = Chunk(self.id, self.created, self.model, (), usage)
        return sse.event(_encode(chunk)) + sse.DONE

    def empty_chunk(self) -> bytes:
        """The role, if nothing else was sent, or a chunk with an empty delta."""
        is_first = 0 not in self._begun
        self._begun.add(0)
        news = Delta(role="assistant", content="") if is_first else Delta()
        return sse.event(self._chunk(ChunkChoice(news), None))

    def _chunk(self, choice: ChunkChoice, so_far: protocol.Usage | None) -> bytes:
        usage = self.usage_so_far(so_far)
        return _encode(Chunk(self.id, self.created, self.model, (choice,), usage))


_encode = msgspec.json.Encoder().encode


def _choice(index: int, deltas: Sequence[protocol.Delta]) -> Choice:
    """A whole choice; its last delta has the finish reason."""
    finish_reason = deltas[-1].finish_reason
    assert finish_reason is not None
    text = "".join(delta.text for delta in deltas if not delta.is_reasoning)
    reasoning = "".join(delta.text for delta in deltas if delta.is_reasoning)
    calls = _calls(deltas)
    message = AnswerMessage(
        content=None if calls and not text else text,
        reasoning_content=reasoning or UNSET,
        tool_calls=calls or UNSET,
    )
    logprobs = [entry for delta in deltas for entry in delta.logprobs]
    return Choice(message, finish_reason, index, _logprobs(logprobs))


def _calls(deltas: Sequence[protocol.Delta]) -> tuple[ToolCall, ...]:
    """The whole calls in the deltas of a choice."""
    news: dict[int, list[protocol.ToolCallDelta]] = {}
    for delta in deltas:
        if delta.tool_call is not None:
            news.setdefault(delta.tool_call.index, []).append(delta.tool_call)
    return tuple(
        ToolCall(each[0].id, Function("".join(one.arguments for one in each), each[0].name))
        for _, each in sorted(news.items())
    )


def _news(delta: protocol.Delta) -> list[Delta]:
    """Chunks of `delta` but for its end; at least one, if it has log probabilities."""
    news = [] if delta.tool_call is None else _call_news(delta.tool_call)
    if news or not (delta.text or delta.logprobs):
        return news
    return [
        Delta(reasoning_content=delta.text) if delta.is_reasoning else Delta(content=delta.text)
    ]


def _call_news(call: protocol.ToolCallDelta) -> list[Delta]:
    """Chunks of more of a call: first the name, apart from the arguments."""
    news = []
    if call.name:
        head = ToolCallDelta(call.index, Function("", call.name), call.id, "function")
        news.append(Delta(tool_calls=(head,)))
    if call.arguments:
        more = ToolCallDelta(call.index, Function(call.arguments))
        news.append(Delta(tool_calls=(more,)))
    return news


def _logprobs(entries: Sequence[protocol.TokenLogprob]) -> Logprobs | None:
    """None without entries: they were not requested."""
    if not entries:
        return None
    return Logprobs(tuple(map(token_logprob, entries)))


def usage_of(
    usage: protocol.Usage,
    images: tuple[protocol.ImageUse, ...] = (),
    videos: tuple[protocol.VideoUse, ...] = (),
) -> Usage:
    """`usage` as JSON."""
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(usage.cached_tokens),
        completion_tokens_details=CompletionTokensDetails(
            usage.reasoning_tokens,
            usage.accepted_prediction_tokens,
            usage.rejected_prediction_tokens,
        ),
        images=images or UNSET,
        videos=videos or UNSET,
    )


# ---- text completions --------------------------------------------------------------------


class TextLogprobs(msgspec.Struct, frozen=True):
    """One entry for each token; `text_offset` counts characters of the tokens before it."""

    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    top_logprobs: tuple[dict[str, float], ...]
    text_offset: tuple[int, ...]


class TextChoice(msgspec.Struct, frozen=True):
    text: str
    index: int
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None


class TextCompletion(msgspec.Struct, frozen=True, tag_field="object", tag="text_completion"):
    """A whole answer, or a chunk of one."""

    id: str
    created: int
    model: str
    choices: tuple[TextChoice, ...]
    usage: Usage | UnsetType | None = UNSET


@dataclass(frozen=True, slots=True)
class CompletionRenderer(ChunkRenderer):
    """The JSON of one answer: a whole completion, or its chunks."""

    _offsets: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Characters of the tokens of each choice so far."""

    def whole(
        self, choices: Sequence[Sequence[protocol.Delta]], finished: protocol.Finished
    ) -> bytes:
        answers = tuple(self._choice(deltas) for deltas in choices)
        return self._completion(answers, usage_of(finished.usage))

    def delta(self, delta: protocol.Delta) -> bytes:
        """One chunk."""
        usage = self.usage_so_far(delta.usage)
        return sse.event(self._completion((self._choice((delta,)),), usage))

    def end(self, finished: protocol.Finished) -> bytes:
        """The usage, if the client wants it, and `[DONE]`."""
        if not self.options.include_usage:
            return sse.DONE
        return sse.event(self._completion((), usage_of(finished.usage))) + sse.DONE

    def empty_chunk(self) -> bytes:
        return self.delta(protocol.Delta(self.id, ""))

    def _completion(
        self, choices: tuple[TextChoice, ...], usage: Usage | UnsetType | None
    ) -> bytes:
        completion = TextCompletion(self.id, self.created, self.model, choices, usage)
        return _encode(completion)

    def _choice(self, deltas: Sequence[protocol.Delta]) -> TextChoice:
        """`deltas` of one choice, joined."""
        last = deltas[-1]
        entries = [entry for delta in deltas for entry in delta.logprobs]
        return TextChoice(
            text="".join(delta.text for delta in deltas),
            index=last.choice,
            logprobs=self._logprobs(last.choice, entries) if entries else None,
            finish_reason=last.finish_reason,
        )

    def _logprobs(self, choice: int, entries: Sequence[protocol.TokenLogprob]) -> TextLogprobs:
        offsets = []
        for entry in entries:
            offsets.append(self._offsets[choice])
            self._offsets[choice] += len(entry.token.text)
        return TextLogprobs(
            tokens=tuple(entry.token.text for entry in entries),
            token_logprobs=tuple(finite(entry.token.logprob) for entry in entries),
            top_logprobs=tuple(
                {top.text: finite(top.logprob) for top in reversed(entry.top)} for entry in entries
            ),
            text_offset=tuple(offsets),
        )
