"""The JSON of answers: the lines of a stream, or one line that says it all."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from vlm_server import protocol
from vlm_server.api.http.answer import finite


class FunctionCall(msgspec.Struct, frozen=True):
    """`arguments` is an object, not its text."""

    index: int
    name: str
    arguments: dict[str, Any]


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    function: FunctionCall


class AnswerMessage(msgspec.Struct, frozen=True):
    role: str
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: tuple[ToolCall, ...] | UnsetType = UNSET


class TopLogprob(msgspec.Struct, frozen=True):
    """`bytes` is `token` in UTF-8, or the part of a character that it is."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


class TokenLogprob(TopLogprob, frozen=True):
    top_logprobs: tuple[TopLogprob, ...] | UnsetType = UNSET


class Usage(msgspec.Struct, frozen=True):
    """Ours: the size at which the model saw each picture, and its tokens."""

    images: tuple[protocol.ImageUse, ...]


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """`message` is `/api/chat`'s, `response` and `thinking` `/api/generate`'s. What follows `done`
    is the last line's; durations are in nanoseconds."""

    model: str
    created_at: str
    message: AnswerMessage | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    logprobs: tuple[TokenLogprob, ...] | UnsetType = UNSET
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_cached_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET


def time_text(seconds: float) -> str:
    """Seconds since 1970 as Ollama writes times."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def measures(finished: protocol.Finished) -> dict[str, int]:
    """The counts and durations of an answer; a load is not told apart.

    What came before the first text is the prompt's, its wait for the device included.
    """
    usage, times = finished.usage, finished.times
    return {
        "total_duration": _nanoseconds(times.total_seconds),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_cached_count": usage.cached_tokens,
        "prompt_eval_duration": _nanoseconds(times.first_text_seconds),
        "eval_count": usage.completion_tokens,
        "eval_duration": _nanoseconds(times.total_seconds - times.first_text_seconds),
    }


def usage_of(finished: protocol.Finished) -> Usage | UnsetType:
    """Nothing without pictures."""
    return Usage(finished.images) if finished.images else UNSET


def scored(
    entries: Sequence[protocol.TokenLogprob],
) -> tuple[TokenLogprob, ...] | UnsetType:
    """Nothing without entries, that is, if they were not requested."""
    return tuple(map(_token, entries)) or UNSET


def _token(entry: protocol.TokenLogprob) -> TokenLogprob:
    top = tuple(TopLogprob(*_shown(token)) for token in entry.top)
    return TokenLogprob(*_shown(entry.token), top or UNSET)


def _shown(token: protocol.TokenText) -> tuple[str, float, tuple[int, ...]]:
    return token.text, finite(token.logprob), tuple(token.utf8)


def _nanoseconds(seconds: float) -> int:
    """At least 1: clients divide by it."""
    return max(1, round(seconds * 1e9))
