"""An answer's content blocks, as Anthropic writes them, and their events in a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from msgspec import Raw, Struct

from vlm_server.api.dialects.anthropic.schema import SIGNATURE
from vlm_server.protocol import Delta


class TextBlock(Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Raw | dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class TextDelta(Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, frozen=True, tag_field="type", tag="signature_delta"):
    signature: str


class InputDelta(Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


BlockDelta = TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStart(Struct, frozen=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Block


class BlockNews(Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: BlockDelta


class BlockStop(Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    index: int


BlockEvent = BlockStart | BlockNews | BlockStop
Kind = Literal["text", "thinking", "tool_use"]


@dataclass(slots=True)
class OpenBlock:
    """The block under way. `call`: the number of its tool call; -1 for other blocks."""

    kind: Kind
    call: int = -1
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, delta: Delta) -> Self:
        """The block that `delta` begins."""
        call = delta.tool_call
        if call is None:
            return cls(_kind_of(delta))
        return cls("tool_use", call.index, call.id, call.name)

    def takes(self, delta: Delta) -> bool:
        """Whether `delta` continues the block."""
        call = -1 if delta.tool_call is None else delta.tool_call.index
        return self.kind == _kind_of(delta) and self.call == call

    def start(self) -> Block:
        """The empty block, which begins it in a stream."""
        match self.kind:
            case "text":
                return TextBlock("")
            case "thinking":
                return ThinkingBlock("", "")
            case "tool_use":
                return ToolUseBlock(self.id, self.name, {})

    def whole(self) -> Block:
        """The block with all its pieces; without arguments that were cut off."""
        text = "".join(self.pieces)
        match self.kind:
            case "text":
                return TextBlock(text)
            case "thinking":
                return ThinkingBlock(text, SIGNATURE)
            case "tool_use":
                return ToolUseBlock(self.id, self.name, _arguments(text))

    def more(self, piece: str) -> BlockDelta:
        """The delta of its next piece in a stream."""
        match self.kind:
            case "text":
                return TextDelta(piece)
            case "thinking":
                return ThinkingDelta(piece)
            case "tool_use":
                return InputDelta(piece)


def blocks_of(deltas: Sequence[Delta], *, shows_reasoning: bool) -> tuple[Block, ...]:
    """The blocks of a whole answer."""
    blocks: list[OpenBlock] = []
    for delta in deltas:
        if not _is_news(delta):
            continue
        if not blocks or not blocks[-1].takes(delta):
            blocks.append(OpenBlock.of(delta))
        blocks[-1].pieces.append(_piece_of(delta, shows_reasoning=shows_reasoning))
    return tuple(block.whole() for block in blocks)


@dataclass(slots=True)
class BlockStream:
    """An answer's blocks as events. Keeps no text."""

    shows_reasoning: bool
    _index: int = -1
    _open: OpenBlock | None = None

    def take(self, delta: Delta) -> Iterator[BlockEvent]:
        """The events of `delta`."""
        if not _is_news(delta):
            return
        if self._open is None or not self._open.takes(delta):
            yield from self.close()
            self._index += 1
            self._open = OpenBlock.of(delta)
            yield BlockStart(self._index, self._open.start())
        if piece := _piece_of(delta, shows_reasoning=self.shows_reasoning):
            yield BlockNews(self._index, self._open.more(piece))

    def close(self) -> Iterator[BlockEvent]:
        """The events of the last block's end."""
        if self._open is None:
            return
        if self._open.kind == "thinking":
            yield BlockNews(self._index, SignatureDelta(SIGNATURE))
        self._open = None
        yield BlockStop(self._index)


def _is_news(delta: Delta) -> bool:
    """Whether `delta` belongs to a block."""
    return bool(delta.text) or delta.tool_call is not None


def _piece_of(delta: Delta, *, shows_reasoning: bool) -> str:
    """The text or arguments that `delta` adds to its block."""
    if delta.tool_call is not None:
        return delta.tool_call.arguments
    return "" if delta.is_reasoning and not shows_reasoning else delta.text


def _kind_of(delta: Delta) -> Kind:
    if delta.tool_call is not None:
        return "tool_use"
    return "thinking" if delta.is_reasoning else "text"


def _arguments(text: str) -> Raw | dict[str, Any]:
    try:
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    return Raw(text.encode()) if is_object else {}
