"""The engine's events for the front: its start, answers and their ends."""

from __future__ import annotations

from typing import Literal

import msgspec

from vlm_server.protocol.stats import Stats

FinishReason = Literal["stop", "length", "tool_calls"]


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one request, over all its choices.

    `prompt_tokens` counts those of the images too, `completion_tokens` those of reasoning:
    `reasoning_tokens`, with those of its marks. Draft tokens that were verified are
    part of the completion (`accepted_prediction_tokens`) or were wrong (`rejected_...`).
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Progress before `Ready`; `fraction` runs from 0 to 1."""

    stage: str
    fraction: float


class ModelFacts(msgspec.Struct, frozen=True):
    """Facts about the loaded model, for clients.

    `size_bytes` is that of its weights on the device, `modified_at` the newest change of its files
    in seconds since 1970, `digest` a SHA-256 in hex: see `Checkpoint.digest`.
    `quantization` names the weights' type, such as `4bit` or `bfloat16`. `capabilities` are of
    "completion", "vision", "video", "tools", "thinking" and "structured_output"; a model that makes
    vectors has "embedding", and "multi_vector" if it makes one for each token, of
    `vector_dimensions` numbers; one that scores documents has "rerank". An image is seen
    with `min_image_pixels` to `max_image_pixels`, its sides multiples of `image_side_multiple`; 0
    where its size is the processor's own. `coordinates` is "pixels" if answers point at pixels of
    the image as the model sees it, "thousandths" if they run from 0 to 1000 on both axes, and
    empty if unknown: see docs/agents.md. `warnings` are sentences on why answers may be wrong.
    `drafter` is the kind of its trained drafter, such as `qwen3_5_mtp`; empty without one.
    """

    family: str = ""
    num_parameters: int = 0
    size_bytes: int = 0
    quantization: str = ""
    digest: str = ""
    modified_at: float = 0.0
    capabilities: tuple[str, ...] = ()
    context_tokens: int = 0
    min_image_pixels: int = 0
    max_image_pixels: int = 0
    image_side_multiple: int = 0
    coordinates: str = ""
    warnings: tuple[str, ...] = ()
    vector_dimensions: int = 0
    drafter: str = ""

    @property
    def writes(self) -> bool:
        """Whether the model answers in words; True while that is unknown."""
        return not self.capabilities or "completion" in self.capabilities

    @property
    def reads_images(self) -> bool:
        """Whether the model does; True while that is unknown."""
        return not self.capabilities or "vision" in self.capabilities


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine takes requests: weights are loaded and one of each prompt kind was run."""

    model_type: str
    device: str
    context_tokens: int
    facts: ModelFacts = ModelFacts()


class Unloadable(msgspec.Struct, frozen=True, tag="unloadable"):
    """The checkpoint can't be served; starting again would not help."""

    reason: str


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    request_id: str


class OnDevice(msgspec.Struct, frozen=True, tag="working"):
    """The work that the device is about to do, with the requests before their first token.

    It is sent before the work starts, in case that crashes the process, and replaces the last one.
    """

    prefilling: tuple[str, ...] = ()
    encoding: tuple[str, ...] = ()
    reading: tuple[str, ...] = ()
    """Requests whose cached parts are read from disk."""
    is_decoding: bool = False
    """Whether sequences decode beside that, or alone."""

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Those of all phases, each once."""
        return tuple(dict.fromkeys((*self.reading, *self.encoding, *self.prefilling)))


class TokenText(msgspec.Struct, frozen=True):
    """A token as text, and its log probability. Bytes of half a character read as U+FFFD.

    `partial`: the bytes of a token with such, where its vocabulary says them.
    """

    text: str
    logprob: float
    partial: bytes = b""

    @property
    def utf8(self) -> bytes:
        """The token's UTF-8 bytes."""
        return self.partial or self.text.encode()


class TokenLogprob(msgspec.Struct, frozen=True):
    """A sampled token and the likeliest ones in its place, the likeliest first."""

    token: TokenText
    top: tuple[TokenText, ...]


class ToolCallDelta(msgspec.Struct, frozen=True):
    """More of the tool call number `index` of a choice; its first delta has the id and the name."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Delta(msgspec.Struct, frozen=True):
    """A delta of one choice: text of its answer, or of its reasoning, or more of a tool call.

    `text` may be empty while an incomplete character, a possible stop string or mark, or an
    incomplete call is held back. A token may bring several deltas, in order; the first has its
    `logprobs`. The last delta of a choice, and no other, has its `finish_reason`, and in `stop` the
    stop string that ended it, if one did. `usage` is the request's so far, if it was asked for.
    """

    request_id: str
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    choice: int = 0
    finish_reason: FinishReason | None = None
    is_reasoning: bool = False
    tool_call: ToolCallDelta | None = None
    usage: Usage | None = None
    stop: str | None = None


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """One step's deltas for all requests."""

    deltas: tuple[Delta, ...]


class ImageUse(msgspec.Struct, frozen=True):
    """An image as the model saw it: its size in pixels after all resizing, and its tokens.

    Of families that cut an image into tiles it is the size before the cutting.
    """

    width: int
    height: int
    tokens: int


class VideoUse(msgspec.Struct, frozen=True):
    """A video as the model saw it: how many frames, the time of the last one, and its tokens.

    `truncated`: the video's end is cut or broken, and the frames are from what is whole before.
    `width` and `height` are the frames' size in pixels after all resizing, and `times` their times
    in seconds.
    """

    frames: int
    seconds: float
    tokens: int
    truncated: bool
    width: int
    height: int
    times: tuple[float, ...]


class DocumentUse(msgspec.Struct, frozen=True):
    """A document as the model saw it: the numbers of the pages that were shown, of `num_pages`.

    `pixels` and `tokens` are those of the pages' images, after all resizing; 0 pixels if unknown.
    """

    pages: tuple[int, ...]
    num_pages: int
    pixels: int
    tokens: int


PhaseName = Literal["queue", "prepare", "disk_read", "encode", "prefill", "decode"]


class Phase(msgspec.Struct, frozen=True):
    """The seconds that a request was in a phase of its life in the engine."""

    name: PhaseName
    seconds: float


class Timeline(msgspec.Struct, frozen=True):
    """The phases of a request, each beginning where the one before it ends; some come again.

    The first one begins at `began_at`, on the system's monotonic clock, which the front reads too.
    `queue` lasts until the device begins with the request, without `prepare`. The other phases
    include waits for the device.
    """

    began_at: float = 0.0
    phases: tuple[Phase, ...] = ()


class Times(msgspec.Struct, frozen=True):
    """Begin and end of an answer, in seconds from the arrival of the request's headers."""

    first_text_seconds: float = 0.0
    total_seconds: float = 0.0


class Vectors(msgspec.Struct, frozen=True):
    """The vectors of one input: rows of `dimensions` numbers, float32 in little-endian order.

    `is_multi`: of a model with a vector for each token, of which an input may have only one.
    """

    data: bytes
    dimensions: int
    is_multi: bool = False


class Decision(msgspec.Struct, frozen=True):
    """How likely each option of a question is as its answer, in the order of the options.

    `logprobs`: of the whole option and the answer's end after it. `greedy`: the number of the
    option that greedy sampling of their tokens would choose.
    """

    logprobs: tuple[float, ...]
    greedy: int


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """All choices have ended, or the request was aborted, or it was not to be answered in words.

    `images`, `videos` and `documents` are those of the messages, in order. A prompt that was
    counted comes with its `token_ids`, and with its `text` if it was given as ids; a pooling
    request with the `vectors` of its inputs, the `scores` of all but the first, or the `decisions`
    of its questions. The front fills in `times`.
    """

    request_id: str
    usage: Usage
    is_aborted: bool = False
    images: tuple[ImageUse, ...] = ()
    videos: tuple[VideoUse, ...] = ()
    documents: tuple[DocumentUse, ...] = ()
    token_ids: tuple[int, ...] = ()
    text: str = ""
    times: Times = Times()
    timeline: Timeline = Timeline()
    vectors: tuple[Vectors, ...] = ()
    scores: tuple[float, ...] = ()
    decisions: tuple[Decision, ...] = ()


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A `RequestError` on its way to the client: see `errors.RequestError.from_code`."""

    request_id: str
    code: str
    message: str
    param: str | None = None


class LogLine(msgspec.Struct, frozen=True, tag="log_line"):
    """A line that the engine has written to its log; `level` is a number of `logging`."""

    created: float
    level: int
    text: str


Event = (
    Loading
    | Ready
    | Unloadable
    | Accepted
    | OnDevice
    | Tokens
    | Finished
    | Failed
    | Stats
    | LogLine
)
