"""The contracts between rooms. Knows token ids, numpy arrays and plans; knows no mlx, no HTTP.

`engine` decides and `runner` does: they meet only here.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray
from PIL import Image as PillowImage

from vlm_server.cache.caches import EncodedImage, Prefix
from vlm_server.cache.lru import Lease
from vlm_server.cache.prompt_key import MediaSpan, PromptKey
from vlm_server.errors import RequestError
from vlm_server.protocol import SamplingParams, Submit


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Tokens `start` to `end` (exclusive) of a prompt that are encoded at once.

    They stand for one picture, or for a stretch of one video. `mm_hash` names what is shown,
    with all that its features follow from.
    """

    start: int
    end: int
    mm_hash: str
    inputs: Mapping[str, NDArray[Any]]
    """What the processor made of it alone: `pixel_values`, grids and the like."""
    features: Lease[EncodedImage] | None = None
    """What the encoder cache had of it; then `inputs` are empty."""


SCHEMA_PARAM = "response_format.json_schema.schema"
"""The field of a request that a schema comes from."""


class AnswerMatcher(Protocol):
    """Follows one answer, token by token, on the thread that draws its tokens."""

    @property
    def is_stuck(self) -> bool:
        """Whether the answer can't go on."""
        ...

    def advance(self, token_id: int) -> None:
        """`token_id` was drawn."""
        ...

    def allowed(self) -> NDArray[np.bool_]:
        """(vocabulary,): which tokens may come next; none when it is stuck."""
        ...


class Grammar(Protocol):
    """What an answer must follow. It never changes: answers begin on any thread."""

    def begin(self) -> AnswerMatcher:
        """A matcher at the beginning of an answer."""
        ...


class ChunkPolicy(enum.Enum):
    """Where prefill chunks of a prompt may end, for a family's attention masks to be right."""

    ANYWHERE = "anywhere"
    AFTER_MEDIA = "after the last media token"
    NOWHERE = "nowhere"
    """The whole prompt is prefilled at once."""


@dataclass(frozen=True, slots=True)
class MRope:
    """How a family with M-RoPE gives its tokens three positions each.

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
    """What a model's processor makes of the placeholder of one image or video.

    token_ids: (tokens,) int32, with the text around the media tokens. `inputs` are arrays for the
    vision tower, by name.
    """

    token_ids: NDArray[np.int32]
    inputs: Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class HostModel:
    """What preparing prompts needs of a loaded model. Holds no device array.

    tokenizer: the Hugging Face tokenizer around the fast `backend`.
    video_token_id: None for a family whose videos are shown as images, frame by frame.
    vocabulary_size: the width of the logits; the tokenizer may know fewer tokens, or more.
    fingerprint: names all that an image's features follow from, but for the image.
    image_placeholders: what the chat template may write for an image, likeliest first.
    apply_chat_template: (messages, add_generation_prompt) to the prompt's text.
    process_image: (RGB image, placeholder), process_video: ((frames, height, width, 3) uint8,
    seconds of each frame, placeholder). Neither is thread-safe. Both raise whatever the
    processor does.
    """

    tokenizer: Any
    backend: tokenizers.Tokenizer
    image_token_id: int
    video_token_id: int | None
    eos_token_ids: frozenset[int]
    context_tokens: int
    vocabulary_size: int
    fingerprint: str
    adds_special_tokens: bool
    image_placeholders: tuple[str, ...]
    apply_chat_template: Callable[[Sequence[Mapping[str, Any]], bool], Any]
    process_image: Callable[[PillowImage.Image, str], ProcessedMedia]
    process_video: Callable[[NDArray[np.uint8], Sequence[float], str], ProcessedMedia]
    mrope: MRope | AskPositions | None
    chunk_policy: ChunkPolicy

    @property
    def media_token_ids(self) -> tuple[int, ...]:
        """Tokens that stand for images and videos."""
        if self.video_token_id is None:
            return (self.image_token_id,)
        return self.image_token_id, self.video_token_id


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A request as the runner takes it: token_ids (tokens,) int32, and its spans in order.

    `images` are the spans that `prefix` does not end behind; `spans` are all, with their keys.
    `positions`, (3, tokens) int32, are those of families with M-RoPE, after which a token n
    stands at n + `rope_delta`. `snapshot_points` are the places, in order, where a state is worth
    keeping, for families whose states can't be cut. The first `atomic_prefill_tokens`, for families
    where tokens see later ones, are prefilled at once or all known; `token_types`, (tokens,) int32,
    then are 1 for a picture's tokens and 0 for others. The answer follows `grammar`, if there is
    one. Who drops a prompt releases it.
    """

    token_ids: NDArray[np.int32]
    images: tuple[ImageSpan, ...] = ()
    spans: tuple[MediaSpan, ...] = ()
    positions: NDArray[np.int32] | None = None
    rope_delta: int = 0
    snapshot_points: tuple[int, ...] = ()
    atomic_prefill_tokens: int = 0
    token_types: NDArray[np.int32] | None = None
    grammar: Grammar | None = None
    cache_salt: str = ""
    prefix: Prefix | None = None
    """What the prefix cache had of it."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_cached_tokens(self) -> int:
        return self.prefix.length if self.prefix else 0

    @property
    def is_atomic(self) -> bool:
        """Whether all is prefilled at once: then no other prompt can go on from its KV."""
        return self.atomic_prefill_tokens == self.num_tokens

    @property
    def elements(self) -> PromptKey:
        return PromptKey(self.token_ids, self.spans)

    def release(self) -> None:
        """Let the caches evict what was found for it."""
        for span in self.images:
            if span.features:
                span.features.release()
        if self.prefix:
            self.prefix.release()


class SeqId(NamedTuple):
    """A row of the decode batch: one choice of a request."""

    request_id: str
    choice: int = 0


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that the runner meets for the first time in this plan.

    `images` are the features of the prompt's; its prefill starts behind its prefix.
    """

    request_id: str
    prompt: PreparedPrompt
    sampling: SamplingParams
    images: tuple[EncodedImage, ...] = ()


@dataclass(frozen=True, slots=True)
class EncodeWork:
    """Encode picture `image_index` of a request's prompt."""

    request_id: str
    image_index: int
    prompt: PreparedPrompt


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """Prefill tokens `start` to `end`; if `is_last`, sample and join the decode batch.

    All rows of the request, `sampling.n`, join at once.
    """

    request_id: str
    start: int
    end: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: forget `released`, meet `new`, decode the rows named, and one prompt's chunk.

    A row may be released before it joined: then its prompt is forgotten.
    """

    released: tuple[SeqId, ...] = ()
    new: tuple[NewRequest, ...] = ()
    decode: tuple[SeqId, ...] = ()
    prefill: PrefillWork | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.released or self.new or self.decode or self.prefill)


@dataclass(frozen=True, slots=True)
class TokenScore:
    """How likely a token was, and the likeliest ones, (token id, log probability) each.

    Probabilities are the model's own, before temperature, penalties and bias.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought: tokens that are known by now, and requests that failed alone.

    A request that is among the failures fails with all its rows.
    `logprobs` holds an entry for each token whose request asked for them. A runner may run
    one step ahead: a token may belong to the step before, and a row's token may be missing in
    the step that launched it; its first comes with its prompt's last chunk, or later. `error`
    is what the model or the device raised, if they did.
    """

    tokens: Mapping[SeqId, int] = field(default_factory=dict)
    failures: Mapping[str, RequestError] = field(default_factory=dict)
    logprobs: Mapping[SeqId, TokenScore] = field(default_factory=dict)
    prefill_seconds: float = 0.0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Device memory in bytes: held by arrays, freed and kept for reuse, and what may be used."""

    active_bytes: int
    pool_bytes: int
    limit_bytes: int


class Runner(Protocol):
    """Does what a plan says with the model. All calls come from one thread."""

    @property
    def num_tracked(self) -> int:
        """Prompts and rows that hold device memory."""
        ...

    def execute(self, plan: SchedulerOutput, launched: Callable[[], None]) -> StepResult:
        """Carry out `plan`, and call `launched` once, as soon as the device has its work."""
        ...

    def kv_bytes(self, num_tokens: int) -> int:
        """Device memory of the state of one row of so many tokens; 0 before the first prompt."""
        ...


class Encoder(Protocol):
    """FairQueue pictures into features. All calls come from one thread, beside the runner's."""

    def encode(self, prompt: PreparedPrompt, image_index: int) -> EncodedImage:
        """Raises RequestError for what this picture alone gets wrong."""
        ...


class Preparer(Protocol):
    """FairQueue a request into token ids and pixel arrays. Called from several threads."""

    def prepare(self, submit: Submit) -> PreparedPrompt:
        """Raises RequestError for what this request alone gets wrong."""
        ...

    @property
    def num_tracked(self) -> int:
        """Requests and media that are being prepared."""
        ...

    def abandon(self, request_id: str) -> None:
        """Nobody waits for this request any more: end what takes long. Unknown ids are no error."""
        ...


class DeviceMemory(Protocol):
    """The device's allocator. All calls come from the runner's thread."""

    @property
    def pool_limit_bytes(self) -> int:
        """The most that it keeps for reuse."""
        ...

    @property
    def trims_own_pool(self) -> bool:
        """Whether it gives up what it keeps for reuse, of itself, before it exceeds its limit."""
        ...

    def read(self) -> MemoryReading: ...

    def take_peak(self) -> int:
        """The most bytes that arrays held since the last call."""
        ...

    def settle(self) -> None:
        """Wait until what is under way is done: it may hold what was let go."""
        ...

    def clear(self) -> None:
        """Give what is kept for reuse back to the system, once what is under way is done."""
        ...

    def trim(self) -> None:
        """Give the process's other free memory back; takes long enough to be done when idle."""
        ...

    def footprint_bytes(self) -> int:
        """What the system says that the process takes."""
        ...

    def device_used_bytes(self) -> int:
        """What all programs take, as its driver says; 0 if its memory is the machine's."""
        ...
