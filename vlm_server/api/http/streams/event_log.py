"""The events of one answer, numbered and kept, so that readers may come, leave and resume."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.types import Message, Send

from vlm_server.api.http.streams import sse
from vlm_server.errors import InvalidRequest, NotFound, RequestError

MAX_READERS = 4
"""Readers of one log at a time. One more takes the place of the oldest, whose connection is often
dead without anyone knowing."""
_EVENT_BYTES = 64
"""Bytes counted for an event in addition to its own."""
_LOG_BYTES = 1024
"""Bytes counted for a log without events."""


@dataclass(slots=True, eq=False)
class _Reader:
    """A reader, and the number of the event that it gets next."""

    position: int
    comment: bytes = b""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    is_dismissed: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """The making of an answer.

    owner: of its log. stream_id: the request's id. dialect: its name. last_words: the events that
    end the answer with an error. stop: cancels the run.
    """

    owner: str
    stream_id: str
    dialect: str
    is_background: bool
    last_words: Callable[[RequestError], bytes]
    stop: Callable[[], object]

    @classmethod
    def of_current_task(
        cls,
        owner: str,
        stream_id: str,
        dialect: str,
        last_words: Callable[[RequestError], bytes],
        *,
        is_background: bool = False,
    ) -> Run:
        task = asyncio.current_task()
        assert task is not None
        return cls(owner, stream_id, dialect, is_background, last_words, task.cancel)


class EventLog:
    """The events of one answer, numbered from 0, with their numbers as SSE's `id:`.

    Its run writes them with `send`. Comments are not kept: only present readers get them.
    `on_growth` is called with the bytes of new events, `on_change` when a reader comes or leaves
    and at the end.
    """

    def __init__(
        self,
        run: Run,
        on_growth: Callable[[EventLog, int], None],
        on_change: Callable[[EventLog], None],
    ) -> None:
        self.run = run
        self.size_bytes = _LOG_BYTES
        self.has_begun = False
        """Whether anything was written."""
        self.is_ended = False
        self._events: list[bytes] = []
        self._num_dropped = 0
        self._readers: list[_Reader] = []
        self._on_growth = on_growth
        self._on_change = on_change

    @property
    def num_readers(self) -> int:
        return len(self._readers)

    @property
    def num_events(self) -> int:
        """The number of events so far, dropped ones included."""
        return self._num_dropped + len(self._events)

    # ---- writing -------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        """ASGI's `send` for the run: whole events and comments."""
        if message["type"] == "http.response.body":
            self.append(message["body"])
            if not message["more_body"]:
                self._end()

    def append(self, data: bytes) -> None:
        """Add events and comments, unless the answer has ended."""
        if self.is_ended:
            return
        self.has_begun, num_bytes = True, 0
        for piece in data.split(b"\n\n")[:-1]:
            if piece.startswith(b":"):
                # without a blank line, which OpenAI's client takes for an event once there are ids
                for reader in self._readers:
                    reader.comment += piece + b"\n"
                continue
            event_id = f"{self.run.stream_id}:{self.num_events}"
            self._events.append(b"%s\nid: %s\n\n" % (piece, event_id.encode()))
            num_bytes += len(self._events[-1]) + _EVENT_BYTES
        self.size_bytes += num_bytes
        self._wake()
        self._on_growth(self, num_bytes)

    def cancel(self, error: RequestError) -> None:
        """End the answer with `error`, and stop its run; no effect after the end."""
        if not self.is_ended:
            self.append(self.run.last_words(error))
            self._end()
            self.run.stop()

    def _end(self) -> None:
        self.is_ended = True
        self._wake()
        self._on_change(self)

    def _wake(self) -> None:
        for reader in self._readers:
            reader.news.set()

    # ---- reading -------------------------------------------------------------------------

    def check(self, position: int, param: str) -> None:
        """Raises InvalidRequest or NotFound unless events can be read from number `position`."""
        if position > self.num_events:
            raise InvalidRequest(f"The stream has no event {position - 1} yet.", param)
        if position < self._num_dropped:
            raise NotFound(
                f"The stream's event {position} was dropped for want of room "
                "(`server.max_stream_resume_bytes`, `server.max_stream_resume_bytes_per_key`).",
                param,
            )

    async def follow(self, position: int, send: Send, greeting: bytes = b"") -> None:
        """Send `greeting` and the events from number `position` on, up to the end, as a response.

        The response ends without the answer's end if the reader is dismissed: see `MAX_READERS`.
        """
        reader = self._enter(position, greeting)
        has_started = is_over = False
        try:
            while not is_over:
                await reader.news.wait()
                reader.news.clear()
                data, is_over = self._take(reader), self.is_ended or reader.is_dismissed
                if not has_started:
                    has_started = True
                    await send(sse.response_start(sse.CONTENT_TYPE))
                await send({"type": "http.response.body", "body": data, "more_body": not is_over})
        finally:
            self.dismiss(reader)

    def _enter(self, position: int, greeting: bytes) -> _Reader:
        if len(self._readers) == MAX_READERS:
            self.dismiss(self._readers[0])
        reader = _Reader(position, greeting)
        self._readers.append(reader)
        if greeting or position < self.num_events:
            reader.news.set()
        self._on_change(self)
        return reader

    def _take(self, reader: _Reader) -> bytes:
        """The comment and the events that `reader` has not got."""
        events = self._events[reader.position - self._num_dropped :]
        data = reader.comment + b"".join(events)
        reader.position, reader.comment = self.num_events, b""
        return data

    def dismiss(self, *readers: _Reader) -> None:
        """End the responses of `readers`, by default of all."""
        for reader in readers or tuple(self._readers):
            if reader in self._readers:
                self._readers.remove(reader)
                reader.is_dismissed = True
                reader.news.set()
                self._on_change(self)

    # ---- room ----------------------------------------------------------------------------

    def drop_events(self, num_bytes: int) -> int:
        """Drop the oldest events, at least `num_bytes` if there are as many that all readers have.

        Returns the bytes dropped.
        """
        num_events, dropped_bytes = 0, 0
        end = min([reader.position for reader in self._readers], default=self.num_events)
        for event in self._events[: end - self._num_dropped]:
            if dropped_bytes >= num_bytes:
                break
            num_events += 1
            dropped_bytes += len(event) + _EVENT_BYTES
        del self._events[:num_events]
        self._num_dropped += num_events
        self.size_bytes -= dropped_bytes
        return dropped_bytes
