"""The interface between a dialect and the endpoint that answers its requests (`generation`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from vlm_server.api.parsing.parsed_request import ReadText
from vlm_server.errors import InternalError, RequestError
from vlm_server.protocol import Delta, Finished


class Renderer(Protocol):
    """The bytes of one answer: a whole one, or the events of a stream, framed for the wire."""

    def whole(self, choices: Sequence[Sequence[Delta]], finished: Finished) -> bytes:
        """The whole answer; `choices` has all deltas of each choice, at least one."""
        ...

    def delta(self, delta: Delta) -> bytes:
        """The events of a delta, and of the parts of the answer that begin or end with it."""
        ...

    def end(self, finished: Finished) -> bytes:
        """The end of a stream that was answered."""
        ...

    def error(self, error: RequestError) -> bytes:
        """The end of a stream that failed."""
        ...

    def keep_alive(self) -> bytes:
        """The bytes of a silent stream's keep-alive, which readers skip."""
        ...

    def empty_chunk(self) -> bytes:
        """A keep-alive as an event of the dialect's own, which adds nothing to the answer."""
        ...


@dataclass(frozen=True, slots=True)
class CountRenderer:
    """The `Renderer` of requests whose tokens are only counted; never streamed."""

    encode: Callable[[Finished], bytes]

    def whole(self, choices: Sequence[Sequence[Delta]], finished: Finished) -> bytes:
        return self.encode(finished)

    def delta(self, delta: Delta) -> bytes:
        raise InternalError("A request that is counted has an answer.")

    def end(self, finished: Finished) -> bytes:
        return self.encode(finished)

    def error(self, error: RequestError) -> bytes:
        raise error

    def keep_alive(self) -> bytes:
        return b""

    def empty_chunk(self) -> bytes:
        return b""


class Dialect(Protocol):
    """One way of writing requests and answers."""

    @property
    def name(self) -> str:
        """The name by which a parsing process finds its reader."""
        ...

    @property
    def id_prefix(self) -> str:
        """The prefix of request ids."""
        ...

    @property
    def content_type(self) -> bytes:
        """The content type of its streams."""
        ...

    @property
    def read_text(self) -> ReadText: ...

    def renderer(self, request_id: str, model: str, options: bytes) -> Renderer:
        """The renderer of the answer to one request. `options`: see `ParsedRequest`."""
        ...
