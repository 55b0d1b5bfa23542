"""The structs that cross the socket between the front and an engine process.

Knows bytes and numbers; knows neither who sends them nor what a model is. A message is a
4-byte big-endian length and that many bytes of msgpack. Each accepted request gets exactly
one terminal event: `Finished` or `Failed`.
"""

from __future__ import annotations

import signal
import struct
from typing import Literal

import msgspec

from vlm_server import settings

MESSAGE_HEADER = struct.Struct(">I")
MAX_MESSAGE_BYTES = 1 << 30

FinishReason = Literal["stop", "length", "tool_calls"]


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    text: str


class ImagePart(msgspec.Struct, frozen=True, tag="image"):
    """The place of one picture in a message; `index` points into `Submit.images`."""

    index: int


class VideoPart(msgspec.Struct, frozen=True, tag="video"):
    """The place of one video in a message; `index` points into `Submit.videos`."""

    index: int


ContentPart = TextPart | ImagePart | VideoPart


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the model made; `arguments` is the JSON of an object."""

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True):
    """One turn. The result of a tool call has the role `tool` and may hold images, too.

    `reasoning` is what the assistant thought before `content`, and `tool_calls` what it called
    after it. `tool_call_id` names the call that a result is of, and `name` its tool.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: tuple[ContentPart, ...]
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


class Tools(msgspec.Struct, frozen=True):
    """What the model may call.

    `definitions` is the JSON of a list of tools as OpenAI's chat completions have them: `{"type":
    "function", "function": {"name": ..., "description": ..., "parameters": <JSON schema>}}`. With
    `choice` "required" the answer is calls and nothing else, made of those in `allowed` (all, if
    it is empty). Without `parallel` it is one call at most. `strict` names the tools whose
    arguments must match their schema although the model is free to call them.
    """

    definitions: str
    choice: Literal["auto", "required"] = "auto"
    allowed: tuple[str, ...] = ()
    parallel: bool = True
    strict: tuple[str, ...] = ()


class TemplateOptions(msgspec.Struct, frozen=True):
    """How the chat template writes the prompt.

    A model that may think or not does so if `enable_thinking`; None is the same as False, for it
    and for its template.
    `variables` is the JSON of an object with more of the template's own; it wins if it sets
    `enable_thinking`, too. With `continue_final` the answer goes on where the last message, which
    is the assistant's, ends.
    """

    enable_thinking: bool | None = None
    variables: str = "{}"
    continue_final: bool = False


class Image(msgspec.Struct, frozen=True):
    """One encoded picture, as it came, with what its header says.

    `content_hash` is the SHA-256 of `data` in hex; `param` names the part it came from. The model
    is shown the picture with neither side longer than `max_side_pixels`, and scaled to `min_pixels`
    to `max_pixels` in all, within what model and server allow; None sets no bound. With
    `for_grounding` it has as many tokens as the model needs to point at things, if it allows that.
    """

    data: bytes
    content_hash: str
    format: str
    width: int
    height: int
    param: str
    max_side_pixels: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    for_grounding: bool = False


class Video(msgspec.Struct, frozen=True):
    """One encoded video, as it came: `format` is MP4, WEBM or GIF.

    `content_hash` is the SHA-256 of `data` in hex; `param` names the part it came from.
    """

    data: bytes
    content_hash: str
    format: str
    param: str


class SamplingParams(msgspec.Struct, frozen=True):
    """How one request draws its tokens. `temperature` 0 is greedy; `top_k` 0 is off.

    `n` answers, its choices, are drawn side by side from one prompt; the limits are each one's.
    Presence and frequency penalties count the answer's tokens, the repetition penalty those of
    the prompt too. `logprobs` is how many alternatives to report for each token; None reports
    nothing. `min_tokens` keeps end tokens from being drawn, `ignore_eos` from ending anything.
    `max_tokens` None means as many as the context leaves room for; `temperature` and `top_p`
    None are the checkpoint's own (`generation_config.json`); `seed` None draws one.
    `json_schema` is the text of one, which the answer conforms to. `max_reasoning_tokens` ends a
    thought that gets longer; None is no bound. With `reports_usage` each delta counts what was used
    so far.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    json_schema: str | None = None
    max_reasoning_tokens: int | None = None
    reports_usage: bool = False


class Deadlines(msgspec.Struct, frozen=True):
    """What a request may still take, in seconds from when it is submitted; None is no deadline.

    `queue_seconds` until the device begins with it, `first_token_seconds` until its first token,
    `token_seconds` from one of its tokens to the next, `total_seconds` until it ends.
    """

    queue_seconds: float | None = None
    first_token_seconds: float | None = None
    token_seconds: float | None = None
    total_seconds: float | None = None


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    request_id: str
    messages: tuple[Message, ...]
    images: tuple[Image, ...]
    sampling: SamplingParams
    videos: tuple[Video, ...] = ()
    cache_salt: str = ""
    """Requests with different ones share no cache entry."""
    client: str = ""
    """Requests of different clients take turns."""
    deadlines: Deadlines = Deadlines()
    tools: Tools | None = None
    template: TemplateOptions = TemplateOptions()
    prompt: str | tuple[int, ...] | None = None
    """The whole prompt as text or as token ids, in place of messages: no template is applied."""
    prediction: str = ""
    """What the answer is expected to be like: drafts are taken from it."""
    count_only: bool = False
    """Whether the prompt is only made and counted: it ends without an answer."""

    @property
    def has_media(self) -> bool:
        """Whether there is more to prepare than text."""
        parts = (part for message in self.messages for part in message.content)
        return not all(isinstance(part, TextPart) for part in parts)

    @property
    def has_schema(self) -> bool:
        """Whether the answer has to follow a schema: its own, or those of tools."""
        has_strict = self.tools is not None and (
            self.tools.choice == "required" or self.tools.strict
        )
        return self.sampling.json_schema is not None or bool(has_strict)


class EncodedSubmit(msgspec.Struct, frozen=True, tag="submit"):
    """A `Submit` whose large parts are encoded already: for who passes it on and reads no more."""

    request_id: str
    messages: msgspec.Raw
    images: msgspec.Raw
    sampling: msgspec.Raw
    videos: msgspec.Raw
    cache_salt: str = ""
    client: str = ""
    deadlines: Deadlines = Deadlines()
    tools: msgspec.Raw = msgspec.Raw(b"\xc0")
    template: msgspec.Raw = msgspec.Raw(b"\x80")
    prompt: msgspec.Raw = msgspec.Raw(b"\xc0")
    prediction: str = ""
    count_only: bool = False


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first command: what to load and how to run it."""

    model: settings.Model
    scheduler: settings.Scheduler
    engine: settings.Engine
    log: settings.Log
    memory: settings.Memory = settings.Memory()
    image: settings.Image = settings.Image()
    video: settings.Video = settings.Video()
    cache: settings.Cache = settings.Cache()


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Finish what is running, take nothing new, write what waits for the disk, end the process."""


class SetMemoryLimit(msgspec.Struct, frozen=True, tag="set_memory_limit"):
    """From now on device memory has this limit: other models need, or left, the rest.

    What runs is let finish; `MemoryStats` tell when all of it is under the limit.
    """

    limit_bytes: int


class ClearCaches(msgspec.Struct, frozen=True, tag="clear_caches"):
    """Drop all that is cached in memory and not in use, and give freed memory back."""


STACKS_SIGNAL = signal.SIGUSR1
"""At this one, an engine writes the stacks of its threads to standard error, even if they hang."""
LAST_WRITES_SECONDS = 5.0
"""The most that an engine writes to the disk once all it ran is finished."""


Command = Start | Submit | Abort | Drain | SetMemoryLimit | ClearCaches


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one request, of all its choices together.

    `prompt_tokens` counts those of the pictures too, `completion_tokens` those of thoughts:
    `reasoning_tokens`, with those of the marks around them. Draft tokens that were verified are
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
    """What a client may want to know of the model that was loaded.

    `size_bytes` is that of its weights on the device, `modified_at` the newest change of its files
    in seconds since 1970, `digest` a SHA-256 in hex that is another one once a file is changed.
    `quantization` names the weights' type, such as `4bit` or `bfloat16`. `capabilities` are of
    "completion", "vision", "video", "tools", "thinking" and "structured_output". A picture is seen
    with `min_image_pixels` to `max_image_pixels`, its sides multiples of `image_side_multiple`; 0
    where its size is the processor's own. `coordinates` is "pixels" if answers point at pixels of
    the picture as the model sees it, "thousandths" if they run from 0 to 1000 on both axes, and
    empty where nobody knows: see docs/agents.md. `warnings` are sentences on why answers may be
    wrong.
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


class Working(msgspec.Struct, frozen=True, tag="working"):
    """Whose pictures and prompts the device is about to encode and prefill.

    It is on its way before the work starts, in case the process dies of it, and stands in the
    place of what was said before. The media of those `encoding` are encoded; the prompts of the
    others are prefilled.
    """

    request_ids: tuple[str, ...]
    encoding: tuple[str, ...] = ()


class TokenText(msgspec.Struct, frozen=True):
    """A token as text, and its log probability. Bytes of half a character read as U+FFFD."""

    text: str
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True):
    """A drawn token and the likeliest ones in its place, the likeliest first."""

    token: TokenText
    top: tuple[TokenText, ...]


class ToolCallDelta(msgspec.Struct, frozen=True):
    """More of the tool call number `index` of a choice; its first delta has the id and the name."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Delta(msgspec.Struct, frozen=True):
    """News of one choice: text of its answer, or of a thought, or more of a tool call.

    `text` may be empty, which is no news, while bytes, what may become a stop or a mark, or a call
    that is not complete are held back. A token may bring several
    deltas, in order; its `logprobs` are the first one's. The last of a choice, and no other, says
    why the choice ended, and in `stop` at which stop string, if it was one. `usage` is the
    request's so far, if it wants to know.
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
    """One step's news for all requests."""

    deltas: tuple[Delta, ...]


class ImageUse(msgspec.Struct, frozen=True):
    """A picture as the model saw it: its size in pixels after all resizing, and its tokens.

    Of families that cut a picture into tiles it is the size before the cutting.
    """

    width: int
    height: int
    tokens: int


PhaseName = Literal["queue", "prepare", "load", "encode", "prefill", "decode"]


class Phase(msgspec.Struct, frozen=True):
    """For how long a request was in a phase of its life in the engine."""

    name: PhaseName
    seconds: float


class Timeline(msgspec.Struct, frozen=True):
    """The phases of a request, each beginning where the one before it ends; some come again.

    The first one begins at `began_at`, on the system's monotonic clock, which the front reads too.
    `queue` is until the device begins with the request, but for `prepare`. The others contain what
    it waited for the device meanwhile.
    """

    began_at: float = 0.0
    phases: tuple[Phase, ...] = ()


class Times(msgspec.Struct, frozen=True):
    """When an answer began and ended, in seconds from when the front got the request's headers."""

    first_text_seconds: float = 0.0
    total_seconds: float = 0.0


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """All choices have ended, or the request was aborted, or it was to be counted only.

    `images` are those of the messages, in order. A prompt that was counted comes with its
    `token_ids`, and with its `text` if it was given as ids. The front fills in `times`.
    """

    request_id: str
    usage: Usage
    is_aborted: bool = False
    images: tuple[ImageUse, ...] = ()
    token_ids: tuple[int, ...] = ()
    text: str = ""
    times: Times = Times()
    timeline: Timeline = Timeline()


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A `RequestError` on its way to the client: see `errors.RequestError.from_code`."""

    request_id: str
    code: str
    message: str
    param: str | None = None


class CacheStats(msgspec.Struct, frozen=True):
    """One cache: sizes in bytes, counters since the engine's start.

    `pinned_bytes` are in use by requests and can't be evicted. A hit of the prefix cache is a
    prompt of which at least one token was found. `damaged` entries were deleted, not used.
    """

    name: str
    entries: int
    size_bytes: int
    pinned_bytes: int
    limit_bytes: int
    hits: int
    misses: int
    evictions: int
    damaged: int = 0


class MemoryStats(msgspec.Struct, frozen=True):
    """Device memory, in bytes, and what was done about it since the engine's start.

    `baseline_bytes` are held without any request: weights. `reserved_bytes` are what running
    requests may still take. `footprint_bytes` is what the system counts for the process,
    `device_used_bytes` what the device's driver counts for all programs (0 where the device is the
    machine itself). `decisions` counts by kind: `clear_` and a reason, `evict`, `wait` (requests
    that waited for memory), `refuse`.
    """

    active_bytes: int
    pool_bytes: int
    peak_bytes: int
    limit_bytes: int
    baseline_bytes: int
    footprint_bytes: int
    device_used_bytes: int
    decisions: dict[str, int]
    clear_seconds: float
    reserved_bytes: int = 0


class RequestProgress(msgspec.Struct, frozen=True):
    """Where one request is: `state` is the name of an `engine.request.states.State`.

    Tokens, of the prompt in `prefill` and of all answers together in `decode`: how many are `done`,
    and how many there may be at most (`total`). Both are 0 in other states.
    """

    request_id: str
    state: str
    done: int = 0
    total: int = 0


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """A reading of the engine, sent about once a second while it changes or has requests.

    It is also the sign that the engine lives, and that it gets on: the pieces of work that its
    threads do are numbered, and one that hangs keeps its number.
    """

    requests: dict[str, int]
    """By state; the names are those of `engine.request.states.State`."""
    tracked: int
    """Requests that are known."""
    tracked_by: dict[str, int]
    """What is remembered of requests, by who remembers it; all 0 when idle."""
    memory: MemoryStats
    generated_tokens: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of `prompt_tokens`, those that the prefix cache had."""
    caches: tuple[CacheStats, ...] = ()
    at_work: dict[str, int] = {}
    """The number of the oldest piece of work of each kind of thread that has one."""
    tool_calls: int = 0
    """Complete ones, in answers that have ended."""
    broken_tool_calls: int = 0
    """Those that were sent as text, or were cut off."""
    media_items: int = 0
    """Pictures and parts of videos in prompts."""
    cached_media_items: int = 0
    """Of these, those that were not encoded for the prompt: some cache had them."""
    spec_drafts: int = 0
    """Sequences whose draft tokens a step verified; counted for each step."""
    spec_draft_tokens: int = 0
    spec_accepted_tokens: int = 0
    """Of `spec_draft_tokens`, those that are part of answers."""
    progress: tuple[RequestProgress, ...] = ()
    """Of each request that has not ended, in the order in which they came."""
    max_num_seqs: int = 0
    """Sequences that may decode together."""


ENCODER, PREPARERS = "encoder", "preparers"
"""The kinds of threads beside the one for inference."""
Event = Loading | Ready | Unloadable | Accepted | Working | Tokens | Finished | Failed | Stats

_encoder = msgspec.msgpack.Encoder()
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_submit_decoder = msgspec.msgpack.Decoder(EncodedSubmit)
_event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode_submit(submit: Submit) -> EncodedSubmit:
    """`submit` with its large parts encoded."""
    return decode_encoded_submit(_encoder.encode(submit))


def decode_encoded_submit(body: bytes | memoryview) -> EncodedSubmit:
    """The `Submit` in a message's body; its large parts are views of `body`."""
    return _submit_decoder.decode(body)


def encode_message(message: Command | EncodedSubmit | Event) -> bytearray:
    """`message` with its header."""
    frame = bytearray(MESSAGE_HEADER.size)
    _encoder.encode_into(message, frame, MESSAGE_HEADER.size)
    MESSAGE_HEADER.pack_into(frame, 0, len(frame) - MESSAGE_HEADER.size)
    return frame


def decode_command(body: bytes | bytearray) -> Command:
    """The command in a message's body. Raises msgspec.DecodeError on anything else."""
    try:
        return _command_decoder.decode(body)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from None


def decode_event(body: bytes) -> Event:
    """The event in a message's body. Raises msgspec.DecodeError on anything else."""
    try:
        return _event_decoder.decode(body)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from None
