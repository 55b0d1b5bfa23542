"""OpenAI's chat and text completions and their chunks, made of the engine's events."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from vlm_server.api.dialects.answer_parts import media_usage
from vlm_server.api.dialects.openai.parse import Options
from vlm_server.api.http import errors
from vlm_server.api.http.answer import as_finite, token_logprob
from vlm_server.api.http.streams import sse
from vlm_server.errors import RequestError
from vlm_server.protocol import Delta, Finished, TokenLogprob, ToolCallDelta, Usage

_encode = msgspec.json.Encoder().encode


class _Renderer(ABC):
    """The JSON of a chat or text completion, or of its chunks."""

    _object: ClassVar[str] = "text_completion"
    _chunk_object: ClassVar[str] = "text_completion"

    def __init__(self, request_id: str, model: str, options: bytes) -> None:
        common = {"id": request_id, "created": int(time.time()), "model": model}
        self._whole = {"object": self._object, **common}
        self._chunk = {"object": self._chunk_object, **common}
        self._options = msgspec.msgpack.decode(options, type=Options)

    @abstractmethod
    def _choice(self, index: int, deltas: Sequence[Delta]) -> dict[str, Any]:
        """The JSON of a choice with all of its `deltas`; for text completions also of some."""

    def whole(self, choices: Sequence[Sequence[Delta]], finished: Finished) -> bytes:
        answers = [self._choice(index, deltas) for index, deltas in enumerate(choices)]
        return _encode(self._whole | {"choices": answers, "usage": _usage_of_all(finished)})

    def end(self, finished: Finished) -> bytes:
        """The usage, if requested, and `[DONE]`."""
        if not self._options.include_usage:
            return sse.DONE
        return self._event([], {"usage": _usage_of_all(finished)}) + sse.DONE

    def error(self, error: RequestError) -> bytes:
        """An event with the error, and no `[DONE]`."""
        return sse.event(errors.encode_openai(error))

    def keep_alive(self) -> bytes:
        return sse.KEEP_ALIVE

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> bytes:
        return sse.event(_encode({**self._chunk, "choices": choices, **usage}))

    def _usage_so_far(self, usage: Usage | None) -> dict[str, Any]:
        """The field `usage`, if any, of a chunk that is not the last."""
        if self._options.continuous_usage and usage is not None:
            return {"usage": _usage(usage)}
        return {"usage": None} if self._options.include_usage else {}


class ChatRenderer(_Renderer):
    _object = "chat.completion"
    _chunk_object = "chat.completion.chunk"

    def __init__(self, request_id: str, model: str, options: bytes) -> None:
        super().__init__(request_id, model, options)
        self._begun = set[int]()
        """Choices with a chunk already sent."""

    def delta(self, delta: Delta) -> bytes:
        """Chunks with the role, the text or the call, and the finish reason."""
        deltas = self._role(delta.choice) + _deltas_of(delta)
        choices = [_chunk_choice(change, delta.choice) for change in deltas]
        if delta.logprobs:
            choices[-1]["logprobs"] = _logprobs(delta.logprobs)
        if delta.finish_reason:
            choices.append(_chunk_choice({}, delta.choice, delta.finish_reason))
        usage = self._usage_so_far(delta.usage)
        return b"".join([self._event([choice], usage) for choice in choices])

    def empty_chunk(self) -> bytes:
        """The role, if nothing else was sent, or a chunk with an empty delta."""
        (delta,) = self._role(0) or [{}]
        return self._event([_chunk_choice(delta, 0)], self._usage_so_far(None))

    def _role(self, choice: int) -> list[dict[str, Any]]:
        """The first delta of a choice, once."""
        if choice in self._begun:
            return []
        self._begun.add(choice)
        return [{"role": "assistant", "content": ""}]

    def _choice(self, index: int, deltas: Sequence[Delta]) -> dict[str, Any]:
        assert deltas[-1].finish_reason is not None
        text = "".join(delta.text for delta in deltas if not delta.is_reasoning)
        reasoning = "".join(delta.text for delta in deltas if delta.is_reasoning)
        calls = _calls(deltas)
        message: dict[str, Any] = {
            "content": None if calls and not text else text,
            "role": "assistant",
            "refusal": None,
        }
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {
            "message": message,
            "finish_reason": deltas[-1].finish_reason,
            "index": index,
            "logprobs": _logprobs([entry for delta in deltas for entry in delta.logprobs]),
        }


def _chunk_choice(
    delta: dict[str, Any], index: int, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"delta": delta, "finish_reason": finish_reason, "index": index, "logprobs": None}


def _calls(deltas: Sequence[Delta]) -> list[dict[str, Any]]:
    """The whole calls in the deltas of a choice."""
    calls = defaultdict[int, list[ToolCallDelta]](list)
    for delta in deltas:
        if delta.tool_call is not None:
            calls[delta.tool_call.index].append(delta.tool_call)
    return [
        {
            "id": call[0].id,
            "function": {
                "arguments": "".join(piece.arguments for piece in call),
                "name": call[0].name,
            },
            "type": "function",
        }
        for _, call in sorted(calls.items())
    ]


def _deltas_of(delta: Delta) -> list[dict[str, Any]]:
    """`delta` in OpenAI's form, without its end; at least one if it has log probabilities.

    The first delta of a call has all but its arguments.
    """
    deltas: list[dict[str, Any]] = []
    if (call := delta.tool_call) is not None:
        if call.name:
            function = {"arguments": "", "name": call.name}
            head = {"index": call.index, "function": function, "id": call.id, "type": "function"}
            deltas.append({"tool_calls": [head]})
        if call.arguments:
            arguments_delta = {"index": call.index, "function": {"arguments": call.arguments}}
            deltas.append({"tool_calls": [arguments_delta]})
    if not deltas and (delta.text or delta.logprobs):
        deltas.append({"reasoning_content" if delta.is_reasoning else "content": delta.text})
    return deltas


def _logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    """The log probabilities of `entries`; None without any, since they were not requested."""
    return {"content": list(map(token_logprob, entries)), "refusal": None} if entries else None


def _usage(usage: Usage) -> dict[str, Any]:
    """The usage. Prediction tokens are those of all drafts: see `docs/chat.md`."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        },
    }


def _usage_of_all(finished: Finished) -> dict[str, Any]:
    """The usage with our extensions."""
    return _usage(finished.usage) | media_usage(finished)


class CompletionRenderer(_Renderer):
    def __init__(self, request_id: str, model: str, options: bytes) -> None:
        super().__init__(request_id, model, options)
        self._offsets = defaultdict[int, int](int)
        """The number of characters of each choice so far."""

    def delta(self, delta: Delta) -> bytes:
        """One chunk."""
        choice = self._choice(delta.choice, (delta,))
        return self._event([choice], self._usage_so_far(delta.usage))

    def empty_chunk(self) -> bytes:
        return self.delta(Delta("", ""))

    def _choice(self, index: int, deltas: Sequence[Delta]) -> dict[str, Any]:
        entries = [entry for delta in deltas for entry in delta.logprobs]
        return {
            "text": "".join(delta.text for delta in deltas),
            "index": index,
            "logprobs": self._logprobs(index, entries) if entries else None,
            "finish_reason": deltas[-1].finish_reason,
        }

    def _logprobs(self, choice: int, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """One entry for each token; `text_offset` counts characters of the tokens before it."""
        offsets = []
        for entry in entries:
            offsets.append(self._offsets[choice])
            self._offsets[choice] += len(entry.token.text)
        return {
            "tokens": [entry.token.text for entry in entries],
            "token_logprobs": [as_finite(entry.token.logprob) for entry in entries],
            "top_logprobs": [
                {top.text: as_finite(top.logprob) for top in reversed(entry.top)}
                for entry in entries
            ],
            "text_offset": offsets,
        }
