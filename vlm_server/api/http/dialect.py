"""The interface between a dialect and the endpoint that answers its requests (`generation`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from msgspec import structs
from starlette.datastructures import Headers

from vlm_server.api.http.streams import sse
from vlm_server.api.parsing.conversation import NeedsProcess
from vlm_server.api.parsing.parsed_request import Body, Context, Parse, ParsedRequest
from vlm_server.errors import InternalError, RequestError
from vlm_server.protocol import Delta, Finished


def is_anthropics(headers: Headers) -> bool:
    """Whether a request to a route that OpenAI and Anthropic share is in Anthropic's dialect.

    Its API requires this header of all requests, so all its clients send it.
    """
    return "anthropic-version" in headers


class Renderer(Protocol):
    """The bytes of one answer: a whole one, or the events of a stream, framed for the wire."""

    def whole(self, choices: Sequence[Sequence[Delta]], finished: Finished) -> bytes:
        """The whole answer; `choices` has all deltas of each choice, at least one."""
        ...

    def delta(self, delta: Delta) -> bytes:
        """The events of a delta, and of parts of the answer that begin or end with it."""
        ...

    def end(self, finished: Finished) -> bytes:
        """The end of a successful stream."""
        ...

    def error(self, error: RequestError) -> bytes:
        """The end of a failed stream."""
        ...

    def keep_alive(self) -> bytes:
        """A keep-alive for a silent stream, which readers skip."""
        ...

    def empty_chunk(self) -> bytes:
        """A keep-alive as one of the dialect's events, without any content."""
        ...


@runtime_checkable
class BackgroundRenderer(Renderer, Protocol):
    """The renderer of a dialect whose answers may be made in the background.

    Such an answer is always rendered as events.
    """

    def accepted(self) -> bytes:
        """The whole answer while it is queued."""
        ...

    def begin(self) -> bytes:
        """The first events of a stream, once."""
        ...

    def on_device(self) -> bytes:
        """The events when the device begins with the request."""
        ...


@dataclass(frozen=True, slots=True)
class WordlessRenderer:
    """The `Renderer` of requests answered without words: by counts, vectors or scores."""

    encode: Callable[[Finished], bytes]

    def whole(self, choices: Sequence[Sequence[Delta]], finished: Finished) -> bytes:
        return self.encode(finished)

    def delta(self, delta: Delta) -> bytes:
        raise InternalError("A request that wants no words has an answer in words.")

    def end(self, finished: Finished) -> bytes:
        return self.encode(finished)

    def error(self, error: RequestError) -> bytes:
        raise error

    def keep_alive(self) -> bytes:
        return b""

    def empty_chunk(self) -> bytes:
        return b""


@dataclass(frozen=True, slots=True)
class Dialect:
    """A kind of request, its parser and its renderer.

    name: key of the parser in the parsing process. renderer: makes the renderer of an answer from
    (request id, model, `ParsedRequest.options`). content_type: of its streams.
    """

    name: str
    id_prefix: str
    parse: Parse
    renderer: Callable[[str, str, bytes], Renderer]
    content_type: bytes = sse.CONTENT_TYPE

    def parse_on_thread(self, body: Body, context: Context) -> ParsedRequest | None:
        """The request in `body`; None if it must be parsed in a process. See `ParseOnThread`."""
        try:
            return self.parse(body, structs.replace(context, on_thread=True))
        except NeedsProcess:
            return None
