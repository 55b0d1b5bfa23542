"""The specification of a loaded model for preparing prompts: made by `runner`, used by `prompt`."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray


class ChunkPolicy(enum.Enum):
    """The positions where prefill chunks may end, given a family's attention masks."""

    ANYWHERE = "anywhere"
    AFTER_MEDIA = "after the last media token"
    NOWHERE = "nowhere"
    """The whole prompt is prefilled in one chunk."""


@dataclass(frozen=True, slots=True)
class MRope:
    """The parameters of a family's M-RoPE positions, three for each token."""

    merge_size: int
    """The side, in patches, of the square that becomes one token."""
    splits_videos: bool
    """Whether text, such as a timestamp, stands between a video's frame groups. Each group then has
    the positions of an image."""


AskPositions = Callable[[NDArray[np.int32], Mapping[str, NDArray[Any]]], NDArray[np.int32]]
"""(token ids of a media item, (tokens,); its grids by name) to positions (3, tokens), computed by
the model, for families that are not checked."""


@dataclass(frozen=True, slots=True)
class ProcessedMedia:
    """The processor's output for the placeholder of one image or video."""

    token_ids: NDArray[np.int32]
    """(tokens,), including the text around the media tokens."""
    inputs: Mapping[str, NDArray[Any]]
    """Arrays for the vision tower, by name."""
    size: tuple[int, int] | None = None
    """The width and height to which an image or the frames of a video were resized."""


@dataclass(frozen=True, slots=True)
class StandIn:
    """The tokens of an image in the prompt of a model that reads one negative id for an image."""

    token_id: int
    """A token that was added to the tokenizer."""
    num_tokens: int
    """The number of these tokens per image, that of its features."""
    model_id: int
    """The id that the model reads."""


@dataclass(frozen=True, slots=True)
class PixelRule:
    """The image sizes of a family of dynamic resolution: `min_pixels` to `max_pixels`."""

    factor: int
    """The divisor of both sides; a square of this side becomes one token."""
    min_pixels: int
    max_pixels: int
    grounding_tokens: int = 0
    """The number of tokens with which the model locates things in a screenshot; 0 if unknown."""

    @property
    def max_tokens(self) -> int:
        """The maximum number of tokens of an image."""
        return self.max_pixels // self.factor**2


@dataclass(frozen=True, slots=True)
class ToolParser:
    """mlx-vlm's parser of the tool calls that a model writes, and the marks around a call."""

    name: str
    start: str
    end: str
    """Empty if a call ends with its JSON."""
    parse: Callable[[str, Sequence[Mapping[str, Any]]], Any]
    """(text between the marks, tools in the chat templates' form) to a call or a list of calls, as
    objects. May raise any exception, and take any time."""
    needs_instruction: bool = False
    """Whether the model knows the format from our instruction alone, not from its template."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around a model's reasoning, such as `<think>` and `</think>`."""

    start: str
    end: str
    headers: tuple[str, ...] = ()
    """Marks around messages of other kinds, which are not part of the answer's text."""
    end_tokens: tuple[str, ...] = ()
    """Tokens that end an answer, besides the checkpoint's own."""
    answer_header: str = ""
    """The mark before the text of an answer without reasoning, if the template does not write
    it: of a model that writes in channels, which reasons unless it is asked not to."""
    after: str = ""
    """The text between reasoning and the next message; empty if the template writes blanks."""


@dataclass(frozen=True, slots=True)
class VectorSpec:
    """The vectors of a model that embeds, and the prompts that it was trained with.

    prompts: texts that stand before inputs, by input type. default_prompt: of an input without a
    type. is_multi: whether there is a vector for each token.
    """

    dimensions: int
    is_multi: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""


@dataclass(frozen=True, slots=True)
class ScoreSpec:
    """The way a model without vectors scores how well a document suits a query.

    answers: the ids of the tokens for yes and no, of a model that is asked; None for one that reads
    the two texts as a pair. has_types: whether that one is told which text a token is of. The other
    texts are those of the question: `instruction` by default, after `before_instruction`, and so
    on.
    """

    answers: tuple[int, int] | None = None
    has_types: bool = False
    system: str = ""
    instruction: str = ""
    before_instruction: str = ""
    before_query: str = ""
    before_document: str = ""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A loaded model for preparing prompts. Holds no device array.

    The processor's functions may raise any exception.
    """

    family: str
    """Its name in messages for users."""
    tokenizer: Any
    """The Hugging Face tokenizer around the fast `backend`."""
    backend: tokenizers.Tokenizer
    image_token_id: int | None
    """None for a model that reads text alone."""
    video_token_id: int | None
    """None for a family whose videos are shown as images, frame by frame."""
    eos_token_ids: frozenset[int]
    context_tokens: int
    vocabulary_size: int
    """The width of the logits; the tokenizer may know fewer tokens, or more."""
    adds_special_tokens: bool
    image_placeholders: tuple[str, ...]
    """The texts that the chat template may write for an image, likeliest first; empty for a model
    that reads text alone."""
    chat_template: str | None
    """The checkpoint's template, an untrusted program; None if there is none, or if the family's
    processor writes prompts itself."""
    template_variables: Mapping[str, Any]
    """The template's variables besides messages."""
    write_prompt: Callable[[Sequence[Mapping[str, Any]], bool], Any]
    """(messages, add_generation_prompt) to text, where there is no template."""
    process_image: Callable[[NDArray[np.uint8], str], ProcessedMedia]
    """((height, width, 3), placeholder) to its tokens and inputs."""
    process_video: Callable[[NDArray[np.uint8], Sequence[float], str], ProcessedMedia]
    """((frames, height, width, 3), seconds of each frame, placeholder) to its tokens and inputs."""
    mrope: MRope | AskPositions | None
    chunk_policy: ChunkPolicy
    frame_token_ids: tuple[int, ...] = ()
    """Tokens around an image's that belong to its span: the model counts images by them."""
    has_states: bool = False
    """Whether some layers have recurrent states, which can be stored only at a chunk's end."""
    image_mark: str = ""
    """A mark around images, of which one stands between two; empty for none."""
    can_batch: bool = True
    """Whether several sequences can decode in one batch."""
    pixel_rule: PixelRule | None = None
    """None where images have a fixed size, or the rule is unknown."""
    stand_in: StandIn | None = None
    """None for models that read a token for each feature of an image."""
    tool_parser: ToolParser | None = None
    """None for models that call no tools."""
    reasoning_format: ReasoningFormat | None = None
    """None for models whose reasoning has no marks."""
    warnings: tuple[str, ...] = ()
    """Sentences about its prompts, for users."""
    vectors: VectorSpec | None = None
    """None for a model that makes none."""
    scores: ScoreSpec | None = None
    """None for a model that scores no documents, or does so by its vectors."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters: a hash of each by its name, in the order of their numbers, from 1 on."""

    @property
    def media_token_ids(self) -> tuple[int, ...]:
        """Tokens that stand for images and videos."""
        token_ids = (self.image_token_id, self.video_token_id)
        return tuple(token_id for token_id in token_ids if token_id is not None)

    @property
    def writes(self) -> bool:
        """Whether the model answers in words."""
        only_scores = self.scores is not None and self.scores.answers is None
        return self.vectors is None and not only_scores

    @property
    def reads_images(self) -> bool:
        return self.image_token_id is not None
