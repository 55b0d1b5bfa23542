"""Anthropic's messages and their events, made of the engine's events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from vlm_server import protocol
from vlm_server.api.dialects.anthropic import errors
from vlm_server.api.dialects.anthropic.blocks import Block, BlockEvent, BlockStream, blocks_of
from vlm_server.api.dialects.anthropic.parse import Options
from vlm_server.api.http import sse
from vlm_server.errors import RequestError

_PING = sse.event(b'{"type":"ping"}', "ping")

StopReason = Literal["end_turn", "stop_sequence", "max_tokens", "tool_use"]

_STOP_REASONS: dict[protocol.FinishReason, StopReason] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


class Usage(Struct, frozen=True):
    """The prompt's tokens are `input_tokens` and `cache_read_input_tokens` together.

    `images` is ours: the size at which the model saw each picture, and its tokens.
    """

    input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0
    images: tuple[protocol.ImageUse, ...] | UnsetType = UNSET


class Message(Struct, frozen=True, tag_field="type", tag="message"):
    id: str
    model: str
    content: tuple[Block, ...] = ()
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: Usage = Usage()
    role: Literal["assistant"] = "assistant"


class MessageStart(Struct, frozen=True, tag_field="type", tag="message_start"):
    message: Message


class Ending(Struct, frozen=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, frozen=True, tag_field="type", tag="message_delta"):
    delta: Ending
    usage: Usage


class MessageStop(Struct, frozen=True, tag_field="type", tag="message_stop"):
    pass


Event = MessageStart | BlockEvent | MessageDelta | MessageStop


class Count(Struct, frozen=True):
    input_tokens: int


@dataclass(slots=True)
class MessageRenderer:
    """The JSON of one answer: a whole message, or its events."""

    id: str
    model: str
    options: Options
    _blocks: BlockStream = field(init=False)
    _is_begun: bool = False
    _ending: Ending | None = None

    def __post_init__(self) -> None:
        self._blocks = BlockStream(self.options.shows_reasoning)

    def whole(
        self, choices: Sequence[Sequence[protocol.Delta]], finished: protocol.Finished
    ) -> bytes:
        (deltas,) = choices
        content = blocks_of(deltas, shows_reasoning=self.options.shows_reasoning)
        ending = _ending(deltas[-1])
        return _encode(
            Message(
                self.id,
                self.model,
                content,
                ending.stop_reason,
                ending.stop_sequence,
                _usage(finished),
            )
        )

    def delta(self, delta: protocol.Delta) -> bytes:
        """The events of `delta`, and of the blocks that begin and end with it."""
        events: list[Event] = [*self._begin(), *self._blocks.take(delta)]
        if delta.finish_reason:
            events += self._blocks.close()
            self._ending = _ending(delta)
        return b"".join(map(_event, events))

    def end(self, finished: protocol.Finished) -> bytes:
        """The stop reason, the usage, and the last event."""
        assert self._ending is not None
        return _event(MessageDelta(self._ending, _usage(finished))) + _event(MessageStop())

    def error(self, error: RequestError) -> bytes:
        """An event with the error, and no `message_stop`."""
        return sse.event(errors.encode(error), "error")

    def keep_alive(self) -> bytes:
        return _PING

    def empty_chunk(self) -> bytes:
        return _PING

    def _begin(self) -> Sequence[Event]:
        """The first event. Its usage is all 0: nothing is counted yet."""
        if self._is_begun:
            return ()
        self._is_begun = True
        return (MessageStart(Message(self.id, self.model)),)


def encode_count(finished: protocol.Finished) -> bytes:
    """The JSON of a prompt's token count, cached tokens included."""
    return _encode(Count(finished.usage.prompt_tokens))


_encode = msgspec.json.Encoder().encode


def _event(event: Event) -> bytes:
    """`event` on the wire, under its own name."""
    name = event.__struct_config__.tag
    assert isinstance(name, str)
    return sse.event(_encode(event), name)


def _ending(delta: protocol.Delta) -> Ending:
    """The stop reason in the last delta of a message."""
    assert delta.finish_reason is not None
    if delta.finish_reason == "stop" and delta.stop is not None:
        return Ending("stop_sequence", delta.stop)
    return Ending(_STOP_REASONS[delta.finish_reason], None)


def _usage(finished: protocol.Finished) -> Usage:
    usage = finished.usage
    return Usage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        images=finished.images or UNSET,
    )
