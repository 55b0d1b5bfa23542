"""A request as the engine gets it: its messages, media and sampling parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

_CHARACTERS_OF_A_TOKEN = 4
"""The usual number in English text."""


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    text: str


class ImagePart(msgspec.Struct, frozen=True, tag="image"):
    """The place of one image in a message; `index` points into `Submit.images`."""

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

    `reasoning` is the assistant's before `content`, and `tool_calls` are its calls
    after it. `tool_call_id` names the call that a result is of, and `name` its tool. `param` names
    the field that it came from, for errors.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: tuple[ContentPart, ...]
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    param: str = ""


class Tools(msgspec.Struct, frozen=True):
    """The tools of a request.

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
    """Options of the chat template.

    A model with optional reasoning reasons if `enable_thinking`; None is the same as False, but for
    a model that writes in channels, which then may.
    `variables` is the JSON of an object with more of the template's own; it wins if it sets
    `enable_thinking`, too. With `continue_final` the answer goes on where the last message, which
    is the assistant's, ends.
    """

    enable_thinking: bool | None = None
    variables: str = "{}"
    continue_final: bool = False


class DocumentPage(msgspec.Struct, frozen=True):
    """The page that an image shows: page `number`, from 1, of the `num_pages` of a document.

    `document` counts the documents of the request from 0.
    """

    document: int
    number: int
    num_pages: int


class Image(msgspec.Struct, frozen=True):
    """One encoded image, as it came, with what its header says.

    `content_hash` is the SHA-256 of `data` in hex; `param` names the part it came from. The model
    is shown the image with neither side longer than `max_side_pixels`, and scaled to `min_pixels`
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
    page: DocumentPage | None = None
    """The page of a document that the image was drawn from, if any."""


FRAME_LIST = "FRAMES"
"""The format of a video that is a list of images."""


class FrameSampling(msgspec.Struct, frozen=True):
    """The frames of a video that a request wants; None leaves it to the settings.

    `fps` is frames per second: of a list of frames, the rate at which they were taken. `num_frames`
    is their number, if the video has as many; `max_frames` bounds what `fps` gives. `start` and
    `end`, in seconds, bound the part that is shown. A frame has `min_pixels` to `max_pixels` as the
    model sees it, and all frames have `total_pixels`, a pair of them counted once as Qwen does.
    `param` names the field of `num_frames`, for errors.
    """

    fps: float | None = None
    num_frames: int | None = None
    max_frames: int | None = None
    start: float = 0.0
    end: float | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    total_pixels: int | None = None
    param: str = ""


class Video(msgspec.Struct, frozen=True):
    """One encoded video, as it came: `format` is MP4, WEBM, GIF or FRAMES.

    `data` of FRAMES is a list of `Image` as msgpack. `content_hash` is the SHA-256 of `data` in
    hex; `param` names the part it came from. `is_cut`: the file is shorter than it says.
    """

    data: bytes
    content_hash: str
    format: str
    param: str
    is_cut: bool = False
    sampling: FrameSampling = FrameSampling()


class SamplingParams(msgspec.Struct, frozen=True):
    """The sampling of one request's tokens. `temperature` 0 is greedy; `top_k` 0 is off.

    `temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty` None are the checkpoint's own
    (`generation_config.json`).

    `n` answers, its choices, are sampled side by side from one prompt; the limits are each one's.
    Presence and frequency penalties count the answer's tokens, the repetition penalty those of
    the prompt too. `logprobs` is how many alternatives to report for each token; None reports
    nothing. `min_tokens` keeps end tokens from being sampled, `ignore_eos` from ending anything.
    `max_tokens` None means as many as the context leaves room for; `seed` None is random.
    `json_schema` is the text of one, which the answer conforms to. `max_reasoning_tokens` ends
    longer reasoning; None is no bound. With `reports_usage` each delta has the usage so far.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    json_schema: str | None = None
    max_reasoning_tokens: int | None = None
    reports_usage: bool = False


class Deadlines(msgspec.Struct, frozen=True):
    """The deadlines of a request, in seconds from its submission; None is no deadline.

    `queue_timeout_seconds` until the device begins with it, `first_token_timeout_seconds` until its
    first token, `token_timeout_seconds` from one of its tokens to the next, `total_timeout_seconds`
    until it ends.
    """

    queue_timeout_seconds: float | None = None
    first_token_timeout_seconds: float | None = None
    token_timeout_seconds: float | None = None
    total_timeout_seconds: float | None = None


class Pooling(msgspec.Struct, frozen=True):
    """What a request wants in place of an answer.

    With "embed", the vectors of each of its inputs, cut to `dimensions` numbers and normalized
    again; None is all numbers that the model has. With "score", how well each input but the first,
    the query, suits that one. With "decide", how likely each of an input's options is as the answer
    to that input, a question about the request's messages. `input_type` names a prompt of the
    checkpoint's, such as "query" or "document", that stands before every input; `instruction` is a
    text in its place.
    """

    task: Literal["embed", "score", "decide"] = "embed"
    dimensions: int | None = None
    input_type: str = ""
    instruction: str = ""


class PoolingInput(msgspec.Struct, frozen=True):
    """One input of a pooling request: a conversation, of one message mostly, or token ids.

    `param` names the field that it came from, for errors. `options`: the answers that a question
    may have, each in as many spellings, one after the other; equal spellings count once.
    """

    messages: tuple[Message, ...] = ()
    prompt: tuple[int, ...] | None = None
    param: str = ""
    options: tuple[str, ...] = ()
    num_spellings: int = 1


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    request_id: str
    messages: tuple[Message, ...]
    images: tuple[Image, ...]
    sampling: SamplingParams
    videos: tuple[Video, ...] = ()
    cache_salt: str = ""
    """Requests with different ones share no cache entry."""
    adapter: str = ""
    """The LoRA adapter that answers; empty is the model itself."""
    client: str = ""
    """Requests of different clients take turns."""
    deadlines: Deadlines = Deadlines()
    tools: Tools | None = None
    template: TemplateOptions = TemplateOptions()
    prompt: str | tuple[int, ...] | None = None
    """The whole prompt as text or as token ids, in place of messages: no template is applied."""
    prediction: str = ""
    """A text that the answer is expected to be like, for drafts."""
    count_only: bool = False
    """Whether the prompt is only made and counted: it ends without an answer."""
    pooling: Pooling | None = None
    """The vectors or scores wanted; None for a request that wants an answer."""
    inputs: tuple[PoolingInput, ...] = ()
    """The inputs of a pooling request, in place of messages and prompt."""

    @property
    def all_messages(self) -> Iterator[Message]:
        """Its messages, and those of its inputs."""
        yield from self.messages
        for each in self.inputs:
            yield from each.messages

    def texts(self) -> Iterator[str]:
        """All texts of the request, JSON as it is, in no order of the prompt."""
        for each in self.inputs:
            yield from each.options
        for message in self.all_messages:
            yield from (part.text for part in message.content if isinstance(part, TextPart))
            yield from (message.reasoning, message.name, message.tool_call_id)
            for call in message.tool_calls:
                yield from (call.id, call.name, call.arguments)
        if self.tools is not None:
            yield self.tools.definitions
        if isinstance(self.prompt, str):
            yield self.prompt
        yield from (self.template.variables, self.sampling.json_schema or "", self.prediction)
        if self.pooling is not None:
            yield self.pooling.instruction

    @property
    def num_characters(self) -> int:
        """The request's size without media: of all texts, a token id counted as text that long."""
        prompts = (self.prompt, *(each.prompt for each in self.inputs))
        num_ids = sum(len(prompt) for prompt in prompts if isinstance(prompt, tuple))
        return sum(map(len, self.texts())) + num_ids * _CHARACTERS_OF_A_TOKEN

    @property
    def has_media(self) -> bool:
        """Whether there is more to prepare than text."""
        parts = (part for message in self.all_messages for part in message.content)
        return not all(isinstance(part, TextPart) for part in parts)

    @property
    def has_schema(self) -> bool:
        """Whether the answer has to follow a schema: its own, or those of tools."""
        has_strict = self.tools is not None and (
            self.tools.choice == "required" or self.tools.strict
        )
        return self.sampling.json_schema is not None or bool(has_strict)


class EncodedSubmit(msgspec.Struct, frozen=True, tag="submit"):
    """A `Submit` whose large parts stay encoded, to be passed on."""

    request_id: str
    messages: msgspec.Raw
    images: msgspec.Raw
    sampling: msgspec.Raw
    videos: msgspec.Raw
    cache_salt: str = ""
    adapter: str = ""
    client: str = ""
    deadlines: Deadlines = Deadlines()
    tools: msgspec.Raw = msgspec.Raw(b"\xc0")
    template: msgspec.Raw = msgspec.Raw(b"\x80")
    prompt: msgspec.Raw = msgspec.Raw(b"\xc0")
    prediction: str = ""
    count_only: bool = False
    pooling: msgspec.Raw = msgspec.Raw(b"\xc0")
    inputs: msgspec.Raw = msgspec.Raw(b"\x90")
