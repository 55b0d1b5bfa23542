"""Conversations to token ids, labels, picture places and M-RoPE positions.

A prompt holds one mark a picture (a still, or one temporal group of a video); each becomes as
many tokens as its grid has merged patches.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from demo_model.calls import Call, Tool, system_text
from demo_model.shape import BLOCK

IMAGE_MARK = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO_MARK = "<|vision_start|><|video_pad|><|vision_end|>"
IGNORED = -100

Ints = NDArray[np.int64]


@dataclass
class Turn:
    """One question and its answer. The first token of one that is forced is not the model's."""

    question: str
    answer: str
    task: str = ""
    is_required: bool = False
    call: Call | None = None
    """What the answer is, where it is a call."""


@dataclass
class Conversation:
    """Turns on pictures; a question holds IMAGE_MARK or VIDEO_MARK where a picture stands."""

    turns: list[Turn]
    system: str | None = None
    pictures: list[NDArray[np.uint8]] = field(default_factory=list)
    tools: list[Tool] = field(default_factory=list)


@dataclass
class Encoded:
    """ids and labels: (length,); positions: (3, length); starts[i]: picture i's first token.

    labels[t] is the token to be predicted at t + 1, or IGNORED; spans: answers' (from, to).
    """

    ids: Ints
    labels: Ints
    positions: Ints
    starts: list[int]
    spans: list[tuple[int, int]]


def merged_tokens(height: int, width: int) -> int:
    return (height // BLOCK) * (width // BLOCK)


class Encoder:
    """Encodes conversations with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.pads = {
            tokenizer.token_to_id("<|image_pad|>"),
            tokenizer.token_to_id("<|video_pad|>"),
        }
        self.end = tokenizer.token_to_id("<|im_end|>")

    def pieces(self, conversation: Conversation) -> list[tuple[str, Turn | None]]:
        """The chat template's text in pieces, each with the turn that it answers, if it does."""
        lead = ""
        system = system_text(conversation.system, conversation.tools)
        if system is not None:
            lead = f"<|im_start|>system\n{system}<|im_end|>\n"
        pieces: list[tuple[str, Turn | None]] = []
        for turn in conversation.turns:
            ask = f"{lead}<|im_start|>user\n{turn.question}<|im_end|>\n<|im_start|>assistant\n"
            pieces += [(ask, None), (f"{turn.answer}<|im_end|>", turn)]
            lead = "\n"
        return pieces

    def encode(self, conversation: Conversation, sizes: list[tuple[int, int]]) -> Encoded:
        """sizes: the (height, width) of every picture, in the order of the marks."""
        ids: list[int] = []
        spans = []
        starts: list[int] = []
        grids = iter(sizes)
        for text, turn in self.pieces(conversation):
            begin = len(ids)
            for token in self.tokenizer.encode(text).ids:
                if token in self.pads:
                    starts.append(len(ids))
                    ids.extend([token] * merged_tokens(*next(grids)))
                else:
                    ids.append(token)
            if turn is not None:
                spans.append((begin + turn.is_required, len(ids)))
        array = np.array(ids, dtype=np.int64)
        labels = np.full(len(ids), IGNORED, dtype=np.int64)
        for begin, end in spans:
            labels[begin - 1 : end - 1] = array[begin:end]
        return Encoded(array, labels, rope_positions(len(ids), starts, sizes), starts, spans)


def rope_positions(length: int, starts: list[int], sizes: list[tuple[int, int]]) -> Ints:
    """(3, length): text counts on; a picture's tokens share a time and count rows and columns.

    As `get_rope_index` of Qwen3-VL has it; the text after a picture starts past its largest
    coordinate.
    """
    positions = np.empty((3, length), dtype=np.int64)
    at = 0
    following = 0
    for start, (height, width) in zip(starts, sizes, strict=True):
        rows, cols = height // BLOCK, width // BLOCK
        positions[:, at:start] = np.arange(following, following + start - at)
        following += start - at
        end = start + rows * cols
        positions[0, start:end] = following
        positions[1, start:end] = following + np.repeat(np.arange(rows), cols)
        positions[2, start:end] = following + np.tile(np.arange(cols), rows)
        following += max(rows, cols)
        at = end
    positions[:, at:] = np.arange(following, following + length - at)
    return positions
