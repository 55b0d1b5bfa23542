"""Parsed requests of all dialects, and their way from a parsing process to the front."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import msgspec

from vlm_server.api.outcomes import SentError
from vlm_server.api.parsing import routing_key
from vlm_server.api.parsing.json_body import Body as Body
from vlm_server.api.parsing.media.documents import Document, Pages, PagesNeeded
from vlm_server.api.parsing.media.external import BytesNeeded, MediaUrl
from vlm_server.errors import RequestError
from vlm_server.platform.child.messages import Parts
from vlm_server.protocol import Submit, decode_encoded_submit, encode_submit
from vlm_server.settings import Limits
from vlm_server.supervisor.engine_process.client import EngineRequest
from vlm_server.supervisor.shape import RequestShape, shape_of


class HistoryNeeded(Exception):
    """Earlier turns are needed to parse a request. Not an error of the client.

    The request continues `response_id`, if not None, and refers to items of `others`.
    """

    def __init__(self, response_id: str | None, others: tuple[str, ...] = ()) -> None:
        super().__init__("earlier turns")
        self.response_id = response_id
        self.others = others


class History(Protocol):
    """The store of earlier turns, for dialects whose requests refer to them."""

    def recall(self, owner: str, response_id: str) -> tuple[bytes, ...]:
        """The turns up to that response, oldest first. Raises RequestError if there is none."""
        ...

    def turn(self, owner: str, response_id: str) -> tuple[bytes, ...]:
        """The turn of that response alone; empty if `owner` has no such response."""
        ...


class KnownModel(msgspec.Struct, frozen=True):
    """A served model, and its properties on which parsing a request depends.

    aliases: further names, or patterns of names. can_reason: whether it writes reasoning, assumed
    until known. stays_loaded: whether `keep_alive` has no effect.
    """

    name: str
    aliases: tuple[str, ...] = ()
    can_reason: bool = True
    stays_loaded: bool = True


class Context(msgspec.Struct, frozen=True):
    """Input of request parsing besides the body."""

    models: tuple[KnownModel, ...]
    """The served models, the default one first."""
    request_id: str
    cache_salt: str
    client: str
    """The name of the API key."""
    limits: Limits
    given: dict[str, bytes] = {}
    """The bytes of `https:` and `file:` URLs read so far."""
    pages: dict[str, Pages] = {}
    """The pages of documents drawn so far: see `media.documents`."""
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    previous: tuple[bytes, ...] | None = None
    """The earlier turns that the request continues (`History`); None until they are needed."""
    others: tuple[bytes, ...] = ()
    """Further turns with items to which the request refers."""
    owner: str = ""
    """The owner of the stored turns that the request may continue."""
    is_admin: bool = True
    on_thread: bool = False
    """Whether parsing runs on a thread of the front: see `conversation.NeedsProcess`."""

    @property
    def num_bytes(self) -> int:
        """Bytes read for the request besides its body."""
        read = map(len, (*self.given.values(), *(self.previous or ()), *self.others))
        return sum(read) + sum(pages.num_bytes for pages in self.pages.values())


class ParsedRequest(msgspec.Struct, frozen=True):
    """A parsed request: the engine's `Submit`, and the form of the answer."""

    model: str
    """The name of a served model."""
    submit: Submit
    stream: bool
    options: bytes = b""
    """Options of the dialect's renderer, in its own encoding."""
    ignored: tuple[str, ...] = ()
    """Paths of the body's fields without effect."""
    generates: bool = True
    """Whether the engine gets the request; otherwise the answer is empty."""
    keep_alive_seconds: float | None = None
    """Time for which the model stays loaded afterwards; None is the model's setting."""
    conversation: str = ""
    """The client's name of the conversation, if any."""
    background: bool = False
    """Whether the answer is made even if the client leaves."""


Parse = Callable[[Body, Context], ParsedRequest]
"""Parses a body. Raises RequestError, or what is needed first, such as BytesNeeded."""
ParseOnThread = Callable[[Body, Context], ParsedRequest | None]
"""As `Parse`, for a request without media; None for a request with media.

Raises RequestError, HistoryNeeded, and BytesNeeded for media whose bytes are elsewhere."""


class ParsingJob(msgspec.Struct, frozen=True):
    """The job of a parsing process for one body."""

    dialect: str
    context: Context


def with_body(job: ParsingJob, body: bytearray) -> Parts:
    """The message to a parsing process: `body`, which is not copied, followed by `job`."""
    encoded = msgspec.msgpack.encode(job)
    last = encoded + len(encoded).to_bytes(_LENGTH_BYTES)
    return Parts(len(body) + len(last), [body, last])


def take_job(body: bytearray) -> ParsingJob:
    """Remove and return the job at the end of `body`."""
    end = len(body) - _LENGTH_BYTES
    start = end - int.from_bytes(body[end:])
    job = msgspec.msgpack.decode(body[start:end], type=ParsingJob)
    del body[start:]
    return job


class RequestSummary(msgspec.Struct, frozen=True, tag=True):
    """The properties of a request that the front needs for its answer."""

    model: str
    stream: bool
    options: bytes
    ignored: tuple[str, ...]
    num_images: int
    num_videos: int
    num_documents: int
    num_pages: int
    num_choices: int
    shape: RequestShape
    generates: bool
    keep_alive_seconds: float | None
    routing_key: str
    background: bool


class Needed(msgspec.Struct, frozen=True, tag=True):
    """`BytesNeeded`, if there are URLs, `PagesNeeded`, if there are documents, or `HistoryNeeded`
    on its way to the front."""

    urls: tuple[MediaUrl, ...] = ()
    documents: tuple[Document, ...] = ()
    response_id: str | None = None
    others: tuple[str, ...] = ()


class EncodedRequest(NamedTuple):
    """A request encoded for the engine, and its summary for the front."""

    request: EngineRequest
    summary: RequestSummary

    @property
    def num_media_bytes(self) -> int:
        """Bytes of its images and videos."""
        submit = self.request.submit
        return memoryview(submit.images).nbytes + memoryview(submit.videos).nbytes


Outcome = ParsedRequest | RequestError | BytesNeeded | PagesNeeded | HistoryNeeded
_Head = RequestSummary | SentError | Needed


def encode_request(parsed: ParsedRequest) -> EncodedRequest:
    """`parsed`, encoded for the engine and summarized for the front."""
    summary = _summary(parsed)
    return EncodedRequest(EngineRequest(encode_submit(parsed.submit), summary.shape), summary)


def encode_outcome(outcome: Outcome) -> bytearray:
    """The answer of a parsing process: the front's bytes after their length, and the `Submit`."""
    encoded = bytearray(_LENGTH_BYTES)
    _encoder.encode_into(_head(outcome), encoded, _LENGTH_BYTES)
    end = len(encoded)
    encoded[:_LENGTH_BYTES] = (end - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES)
    if isinstance(outcome, ParsedRequest):
        _encoder.encode_into(outcome.submit, encoded, end)
    return encoded


def decode_outcome(encoded: bytearray) -> EncodedRequest:
    """The request in a parsing process's answer, whose bytes it shares. Raises other outcomes."""
    view = memoryview(encoded)
    end = _LENGTH_BYTES + int.from_bytes(view[:_LENGTH_BYTES])
    head = _head_decoder.decode(view[_LENGTH_BYTES:end])
    if isinstance(head, SentError):
        raise head.received()
    if isinstance(head, Needed):
        raise _needed(head)
    return EncodedRequest(EngineRequest(decode_encoded_submit(view[end:]), head.shape), head)


def _needed(head: Needed) -> BytesNeeded | PagesNeeded | HistoryNeeded:
    if head.urls:
        return BytesNeeded(head.urls)
    if head.documents:
        return PagesNeeded(head.documents)
    return HistoryNeeded(head.response_id, head.others)


def _head(outcome: Outcome) -> _Head:
    match outcome:
        case RequestError():
            return SentError.of(outcome)
        case BytesNeeded():
            return Needed(outcome.urls)
        case HistoryNeeded():
            return Needed(response_id=outcome.response_id, others=outcome.others)
        case PagesNeeded():
            return Needed(documents=outcome.documents)
        case ParsedRequest():
            return _summary(outcome)


def _summary(parsed: ParsedRequest) -> RequestSummary:
    submit, name = parsed.submit, parsed.conversation
    pages = [image.page for image in submit.images if image.page is not None]
    return RequestSummary(
        model=parsed.model,
        stream=parsed.stream,
        options=parsed.options,
        ignored=parsed.ignored,
        num_images=len(submit.images) - len(pages),
        num_videos=len(submit.videos),
        num_documents=len({page.document for page in pages}),
        num_pages=len(pages),
        num_choices=submit.sampling.n,
        shape=shape_of(submit),
        generates=parsed.generates,
        keep_alive_seconds=parsed.keep_alive_seconds,
        routing_key=routing_key.of_name(name) if name else routing_key.of_submit(submit),
        background=parsed.background,
    )


_LENGTH_BYTES = 4
_encoder = msgspec.msgpack.Encoder()
_head_decoder: msgspec.msgpack.Decoder[_Head] = msgspec.msgpack.Decoder(_Head)
