"""The event logs of resumable answers: who may read them, how long they are kept, and their room.

An answer whose last reader has left runs on for `server.stream_resume_keep_seconds`, and a log is
kept for as long after its end. An answer made in the background runs on without readers.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vlm_server.api.http.body import until_disconnect
from vlm_server.api.http.streams.event_log import EventLog, Run
from vlm_server.errors import InvalidRequest, NotFound
from vlm_server.settings import Server

RESUMABLE_HEADER = "X-VLM-Resumable"
LAST_EVENT_HEADER = "Last-Event-ID"
_GREETING = b": resumed\n"
_ID = re.compile(r"(?P<stream>[0-9a-f]{32})(?::(?P<event>[0-9]{1,12}))?")
_NO_STREAM = (
    "There is no such stream: it was not resumable, or ended, or was left, too long ago "
    "(`server.stream_resume_keep_seconds`), or there was no room for it."
)


def is_wanted(headers: Headers, server: Server) -> bool:
    """Whether a client wants its stream to be resumable. Raises InvalidRequest."""
    value = headers.get(RESUMABLE_HEADER, "false")
    if value not in ("true", "false"):
        raise InvalidRequest(f"{RESUMABLE_HEADER} must be true or false.", RESUMABLE_HEADER)
    return value == "true" and server.max_stream_resume_bytes > 0


class EventLogs:
    """The logs of all owners, by the ids of their streams. Use from one event loop.

    Beyond a limit, the owner with the most bytes loses a log that has ended and is not being read,
    the oldest first, or else the oldest events of its largest log. `max_waiting` bounds the
    answers without a reader: with one more, the owner with the most loses the one left first.
    """

    def __init__(self, server: Server, max_waiting: int) -> None:
        self.limit_bytes = server.max_stream_resume_bytes
        self.num_resumed = 0
        self.num_abandoned = 0
        self._owner_bytes = min(server.max_stream_resume_bytes_per_key, self.limit_bytes)
        self._seconds = server.stream_resume_keep_seconds
        self._max_waiting = max_waiting
        self._by_owner: dict[str, dict[str, EventLog]] = {}
        self._sizes = Counter[str]()
        self._timers: dict[EventLog, asyncio.TimerHandle] = {}
        """Timers of the logs without readers, the one that has waited longest first."""

    def __len__(self) -> int:
        return sum(map(len, self._by_owner.values()))

    @property
    def size_bytes(self) -> int:
        return self._sizes.total()

    @property
    def num_detached(self) -> int:
        """The number of answers being made, less that of their readers' connections."""
        logs = (log for logs in self._by_owner.values() for log in logs.values())
        return sum(1 - log.num_readers for log in logs if not log.is_ended)

    def open(self, run: Run) -> EventLog:
        """A new log, which `close` removes at the latest."""
        log = EventLog(run, self._grow, self._watch)
        self._by_owner.setdefault(run.owner, {})[run.stream_id] = log
        self._grow(log, log.size_bytes)
        return log

    def find(self, owner: str, stream_id: str) -> EventLog:
        """Raises NotFound."""
        log = self._by_owner.get(owner, {}).get(stream_id)
        if log is None:
            raise NotFound(_NO_STREAM)
        return log

    def resume(self, owner: str, dialect: str, last_event_id: str) -> FollowResponse:
        """The rest of a stream. Raises NotFound and InvalidRequest."""
        match = _ID.fullmatch(last_event_id)
        if match is None:
            raise InvalidRequest(
                f"{LAST_EVENT_HEADER} must be the `id` of an event, or a stream's X-Request-Id.",
                LAST_EVENT_HEADER,
            )
        log = self.find(owner, match["stream"])
        if log.run.dialect != dialect:
            raise NotFound(_NO_STREAM)
        position = 0 if match["event"] is None else int(match["event"]) + 1
        return self.follow(log, position, LAST_EVENT_HEADER)

    def follow(self, log: EventLog, position: int, param: str) -> FollowResponse:
        """The events of `log` from number `position` on. Raises NotFound and InvalidRequest."""
        log.check(position, param)
        self.num_resumed += 1
        return FollowResponse(log, position)

    def close(self, log: EventLog) -> None:
        """Forget `log`, and dismiss its readers."""
        owner, stream_id = log.run.owner, log.run.stream_id
        if self._by_owner.get(owner, {}).pop(stream_id, None) is None:
            return
        log.dismiss()
        if timer := self._timers.pop(log, None):
            timer.cancel()
        self._sizes[owner] -= log.size_bytes
        if not self._by_owner[owner]:
            del self._by_owner[owner], self._sizes[owner]

    # ---- time ------------------------------------------------------------------------------

    def _watch(self, log: EventLog) -> None:
        """Start the timer of a log without readers; stop that of others."""
        if timer := self._timers.pop(log, None):
            timer.cancel()
        goes_on = log.run.is_background and not log.is_ended
        if log.num_readers or goes_on or not self._has(log):
            return
        loop = asyncio.get_running_loop()
        self._timers[log] = loop.call_later(self._seconds, self._expire, log)
        self._give_up_some()

    def _give_up_some(self) -> None:
        """Give up the answer that has waited longest of the owner with the most, if necessary."""
        waiting = [log for log in self._timers if not log.is_ended]
        if len(waiting) > self._max_waiting:
            counts = Counter(log.run.owner for log in waiting)
            owner = max(counts, key=lambda each: counts[each])
            self._expire(next(log for log in waiting if log.run.owner == owner))

    def _expire(self, log: EventLog) -> None:
        if not log.is_ended:
            self.num_abandoned += 1
            log.run.stop()
        self.close(log)

    # ---- room ------------------------------------------------------------------------------

    def _has(self, log: EventLog) -> bool:
        return log.run.stream_id in self._by_owner.get(log.run.owner, {})

    def _grow(self, log: EventLog, num_bytes: int) -> None:
        if not self._has(log):
            return
        owner = log.run.owner
        self._sizes[owner] += num_bytes
        while (excess := self._sizes[owner] - self._owner_bytes) > 0:
            if not self._shrink(owner, excess):
                break
        while (excess := self.size_bytes - self.limit_bytes) > 0:
            if not self._shrink(max(self._sizes, key=lambda each: self._sizes[each]), excess):
                break

    def _shrink(self, owner: str, num_bytes: int) -> bool:
        """Drop a log or some events of `owner`; False if the readers need all."""
        logs = self._by_owner[owner].values()
        ended = next((log for log in logs if log.is_ended and not log.num_readers), None)
        if ended is not None:
            self.close(ended)
            return True
        dropped_bytes = _drop_events(logs, num_bytes)
        self._sizes[owner] -= dropped_bytes
        return dropped_bytes > 0


def _drop_events(logs: Iterable[EventLog], num_bytes: int) -> int:
    """Drop events of the largest log that has some to drop; returns their bytes."""
    for log in sorted(logs, key=lambda log: log.size_bytes, reverse=True):
        if dropped_bytes := log.drop_events(num_bytes):
            return dropped_bytes
    return 0


class FollowResponse(Response):
    """The events of `log` from number `position` on, until its end or the client's."""

    def __init__(self, log: EventLog, position: int) -> None:
        super().__init__()
        self._log = log
        self._position = position

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        following = self._log.follow(self._position, send, _GREETING)
        await until_disconnect(receive, following)


class Attachment:
    """The client that made a request, as the first reader of its answer's log, if it has one."""

    def __init__(self, logs: EventLogs) -> None:
        self._logs = logs
        self._log: EventLog | None = None
        self._following: asyncio.Task[None] | None = None

    def leave(self) -> bool:
        """Note that the client has left; returns whether its answer goes on.

        It does not if the client can't resume it, since it has not even got the stream's id.
        """
        if self._following is not None:
            self._following.cancel()
        return self._log is not None and (self._log.run.is_background or self._log.has_begun)

    @asynccontextmanager
    async def to(self, log: EventLog, send: Send | None) -> AsyncIterator[None]:
        """Send the events that the `with` block writes to `log`; nothing without `send`.

        The log is closed if it has not ended by then.
        """
        self._log = log
        if send is not None:
            self._following = asyncio.create_task(log.follow(0, send))
        try:
            yield
        finally:
            if not log.is_ended:
                self.leave()
                self._logs.close(log)
            if self._following is not None:
                await asyncio.gather(self._following, return_exceptions=True)
