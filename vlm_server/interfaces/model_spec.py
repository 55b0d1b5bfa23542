"""The specification of a loaded model for preparing prompts: made by `runner`, used by `prompt`."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray


class ChunkPolicy(enum.Enum):
    """Where prefill chunks of a prompt may end, for a family's attention masks to be right."""

    ANYWHERE = "anywhere"
    AFTER_MEDIA = "after the last media token"
    NOWHERE = "nowhere"
    """The whole prompt is prefilled at once."""


@dataclass(frozen=True, slots=True)
class MRope:
    """The parameters of a family's M-RoPE positions, three for each token.

    merge_size: patches on a side of what becomes one token.
    splits_videos: whether text, such as a timestamp, stands between a video's frame groups. Each
    group then has positions like an image of its own.
    """

    merge_size: int
    splits_videos: bool


AskPositions = Callable[[NDArray[np.int32], Mapping[str, NDArray[Any]]], NDArray[np.int32]]
"""Token ids of a media item, (tokens,), and its grids by name, to positions (3, tokens).

For families that are not checked: their model computes them."""


@dataclass(frozen=True, slots=True)
class ProcessedMedia:
    """The processor's output for the placeholder of one image or video.

    token_ids: (tokens,) int32, with the text around the media tokens. `inputs` are arrays for the
    vision tower, by name. size: width and height to which an image was resized; None of a video.
    """

    token_ids: NDArray[np.int32]
    inputs: Mapping[str, NDArray[Any]]
    size: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class StandIn:
    """The tokens in a prompt that stand in for a model's one id below 0 for a whole image.

    token_id: a token of its own that the tokenizer was given. num_tokens: of them for each image,
    as many as it has features. model_id: what the model reads.
    """

    token_id: int
    num_tokens: int
    model_id: int


@dataclass(frozen=True, slots=True)
class PixelRule:
    """The picture sizes of a family of dynamic resolution.

    A side is a multiple of `factor`, and a square of that side one token; a picture has
    `min_pixels` to `max_pixels`. grounding_tokens: enough to point at things in a
    screenshot; 0 if unknown.
    """

    factor: int
    min_pixels: int
    max_pixels: int
    grounding_tokens: int = 0

    @property
    def max_tokens(self) -> int:
        """The most tokens of a picture."""
        return self.max_pixels // self.factor**2


@dataclass(frozen=True, slots=True)
class ToolParser:
    """mlx-vlm's parser of the tool calls that a model writes, and the marks around one of them.

    `end` is empty if a call ends where its JSON does. parse: (text between the marks, tools as chat
    templates have them) to a call or a list of them, as objects. It raises whatever the text makes
    it, and takes as long as it likes.
    """

    name: str
    start: str
    end: str
    parse: Callable[[str, Sequence[Mapping[str, Any]]], Any]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around a model's reasoning, such as `<think>` and `</think>`.

    headers: marks around messages of other kinds, which are not shown.
    """

    start: str
    end: str
    headers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A loaded model for preparing prompts. Holds no device array.

    tokenizer: the Hugging Face tokenizer around the fast `backend`.
    video_token_id: None for a family whose videos are shown as images, frame by frame.
    vocabulary_size: the width of the logits; the tokenizer may know fewer tokens, or more.
    image_placeholders: what the chat template may write for an image, likeliest first.
    chat_template: the checkpoint's, a program that nobody vouches for; None if there is none, or
    if the family's processor writes prompts itself. template_variables: what it is given beside
    messages. write_prompt: (messages, add_generation_prompt) to text, where there is no template.
    process_image: ((height, width, 3) uint8, placeholder), process_video: ((frames, height, width,
    3) uint8, seconds of each frame, placeholder). Neither is thread-safe. Both raise whatever the
    processor does. stand_in: None for models that read a token for each feature of an image.
    pixel_rule: None where pictures have a fixed size, or the rule is not known.
    tool_parser and reasoning_format: None for models that call no tools, or whose
    reasoning has no marks. warnings: sentences about its prompts, for people.
    """

    tokenizer: Any
    backend: tokenizers.Tokenizer
    image_token_id: int
    video_token_id: int | None
    eos_token_ids: frozenset[int]
    context_tokens: int
    vocabulary_size: int
    adds_special_tokens: bool
    image_placeholders: tuple[str, ...]
    chat_template: str | None
    template_variables: Mapping[str, Any]
    write_prompt: Callable[[Sequence[Mapping[str, Any]], bool], Any]
    process_image: Callable[[NDArray[np.uint8], str], ProcessedMedia]
    process_video: Callable[[NDArray[np.uint8], Sequence[float], str], ProcessedMedia]
    mrope: MRope | AskPositions | None
    chunk_policy: ChunkPolicy
    pixel_rule: PixelRule | None = None
    stand_in: StandIn | None = None
    tool_parser: ToolParser | None = None
    reasoning_format: ReasoningFormat | None = None
    warnings: tuple[str, ...] = ()

    @property
    def media_token_ids(self) -> tuple[int, ...]:
        """Tokens that stand for images and videos."""
        if self.video_token_id is None:
            return (self.image_token_id,)
        return self.image_token_id, self.video_token_id
