"""What all dialects make of a body, and how that gets from an intake process to the front."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

from vlm_server.api.parsing import routing_key
from vlm_server.api.parsing.history import HistoryNeeded
from vlm_server.api.parsing.media.external import BytesNeeded, ExternalUrl
from vlm_server.errors import RequestError
from vlm_server.protocol import Submit, decode_encoded_submit, encode_submit
from vlm_server.settings import Limits
from vlm_server.supervisor.client import EngineRequest
from vlm_server.supervisor.crashes.shape import Shape, shape_of

Body = bytes | bytearray


class KnownModel(msgspec.Struct, frozen=True):
    """A model that is served, and what reading a request for it depends on.

    aliases: more names of it, or patterns of such. can_think: whether it writes thoughts, as far as
    is known. stays_loaded: whether `keep_alive` has no effect.
    """

    name: str
    aliases: tuple[str, ...] = ()
    can_think: bool = True
    stays_loaded: bool = True


class Context(msgspec.Struct, frozen=True):
    """What is known of a request besides its body.

    models: those that are served, the default one first. client: whose request it is. owner: whose
    stored turns it may go on from, see `keys.owner_of`. is_admin: see `keys.is_admin`. given: the
    bytes of the `https:` and `file:` URLs that were read for it. unknown_fields: the setting of the
    server. previous: the earlier turns that it goes on from, see `History`; None until they are
    asked for. others: turns that it refers to items of. on_thread: see `conversation.NeedsProcess`.
    """

    models: tuple[KnownModel, ...]
    request_id: str
    cache_salt: str
    client: str
    limits: Limits
    given: dict[str, bytes] = {}
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    previous: tuple[bytes, ...] | None = None
    others: tuple[bytes, ...] = ()
    owner: str = ""
    is_admin: bool = True
    on_thread: bool = False

    @property
    def num_bytes(self) -> int:
        """Of what was read for the request."""
        return sum(map(len, (*self.given.values(), *(self.previous or ()), *self.others)))


class ParsedRequest(msgspec.Struct, frozen=True):
    """What a dialect makes of a body: the engine's request, and how the client wants the answer.

    `model` is the name of the one that is asked, and stays loaded for `keep_alive_seconds`
    afterwards; None is as its settings say.
    `options` is for the dialect's renderer, which alone reads it. `ignored` names the fields of the
    body that have no effect, by their paths. Without `generates` the answer is empty, and the
    engine gets nothing. `conversation` is what the client calls the conversation, if it does.
    """

    model: str
    submit: Submit
    stream: bool
    options: bytes = b""
    ignored: tuple[str, ...] = ()
    generates: bool = True
    keep_alive_seconds: float | None = None
    conversation: str = ""


Read = Callable[[Body, Context], ParsedRequest]
"""Raises RequestError, BytesNeeded and HistoryNeeded."""
ReadText = Callable[[Body, Context], ParsedRequest | None]
"""The same for a request without media; None for one that has some. Looks at no media.

Raises RequestError, and HistoryNeeded."""


class RequestSummary(msgspec.Struct, frozen=True, tag=True):
    """What the front has to know of a request to answer it."""

    model: str
    stream: bool
    options: bytes
    ignored: tuple[str, ...]
    num_images: int
    num_videos: int
    num_choices: int
    shape: Shape
    generates: bool
    keep_alive_seconds: float | None
    routing_key: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A `RequestError` on its way to the front."""

    code: str
    message: str
    param: str | None


class Needed(msgspec.Struct, frozen=True, tag=True):
    """`BytesNeeded` on its way to the front."""

    urls: tuple[ExternalUrl, ...]


class NeededHistory(msgspec.Struct, frozen=True, tag=True):
    """`HistoryNeeded` on its way to the front."""

    response_id: str | None
    others: tuple[str, ...]


class Call(NamedTuple):
    """A request for the engine, encoded, and what the front keeps of it."""

    request: EngineRequest
    summary: RequestSummary


Outcome = ParsedRequest | RequestError | BytesNeeded | HistoryNeeded
_Head = RequestSummary | Refused | Needed | NeededHistory


def call_of(parsed: ParsedRequest) -> Call:
    """`parsed` as the front needs it."""
    summary = _summary(parsed)
    return Call(EngineRequest(encode_submit(parsed.submit), summary.shape), summary)


def encode_outcome(outcome: Outcome) -> bytearray:
    """What an intake process answers: a length, so many bytes for the front, and the `Submit`."""
    encoded = bytearray(_LENGTH_BYTES)
    _encoder.encode_into(_head(outcome), encoded, _LENGTH_BYTES)
    end = len(encoded)
    encoded[:_LENGTH_BYTES] = (end - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES)
    if isinstance(outcome, ParsedRequest):
        _encoder.encode_into(outcome.submit, encoded, end)
    return encoded


def decode_outcome(encoded: bytearray) -> Call:
    """The call in a process's answer, whose bytes it shares.

    Raises RequestError, BytesNeeded or HistoryNeeded.
    """
    view = memoryview(encoded)
    end = _LENGTH_BYTES + int.from_bytes(view[:_LENGTH_BYTES])
    head = _head_decoder.decode(view[_LENGTH_BYTES:end])
    if isinstance(head, Refused):
        raise RequestError.from_code(head.code, head.message, head.param)
    if isinstance(head, Needed):
        raise BytesNeeded(head.urls)
    if isinstance(head, NeededHistory):
        raise HistoryNeeded(head.response_id, head.others)
    return Call(EngineRequest(decode_encoded_submit(view[end:]), head.shape), head)


def _head(outcome: Outcome) -> _Head:
    match outcome:
        case RequestError():
            return Refused(outcome.code, outcome.message, outcome.param)
        case BytesNeeded():
            return Needed(outcome.urls)
        case HistoryNeeded():
            return NeededHistory(outcome.response_id, outcome.others)
        case ParsedRequest():
            return _summary(outcome)


def _summary(parsed: ParsedRequest) -> RequestSummary:
    submit = parsed.submit
    return RequestSummary(
        model=parsed.model,
        stream=parsed.stream,
        options=parsed.options,
        ignored=parsed.ignored,
        num_images=len(submit.images),
        num_videos=len(submit.videos),
        num_choices=submit.sampling.n,
        shape=shape_of(submit),
        generates=parsed.generates,
        keep_alive_seconds=parsed.keep_alive_seconds,
        routing_key=_routing_key(parsed),
    )


def _routing_key(parsed: ParsedRequest) -> str:
    name = parsed.conversation
    return routing_key.of_name(name) if name else routing_key.of(parsed.submit)


_LENGTH_BYTES = 4
_encoder = msgspec.msgpack.Encoder()
_head_decoder: msgspec.msgpack.Decoder[_Head] = msgspec.msgpack.Decoder(_Head)
