"""What a dialect is to the endpoint that answers its requests: see `http.generation`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vlm_server.api.http.intake.calls import ReadText
from vlm_server.errors import RequestError
from vlm_server.protocol import Delta, Finished


class Renderer(Protocol):
    """The bytes of one answer: a whole one, or the events of a stream, framed for the wire."""

    def whole(self, choices: Sequence[Sequence[Delta]], finished: Finished) -> bytes:
        """The whole answer; `choices` has all deltas of each choice, at least one."""
        ...

    def delta(self, delta: Delta) -> bytes:
        """What the stream says of a delta, and of what begins or ends with it."""
        ...

    def end(self, finished: Finished) -> bytes:
        """The end of a stream that was answered."""
        ...

    def error(self, error: RequestError) -> bytes:
        """The end of a stream that failed."""
        ...


class Dialect(Protocol):
    """One way of writing requests and answers."""

    @property
    def name(self) -> str:
        """Of its reader in the intake process."""
        ...

    @property
    def id_prefix(self) -> str:
        """What a request's id begins with."""
        ...

    @property
    def content_type(self) -> bytes:
        """Of its streams."""
        ...

    @property
    def keep_alive(self) -> bytes | None:
        """What a silent stream sends now and then; None if its readers could not skip it."""
        ...

    @property
    def read_text(self) -> ReadText: ...

    def renderer(self, request_id: str, model: str, options: bytes) -> Renderer:
        """`options`: see `Taken`."""
        ...
