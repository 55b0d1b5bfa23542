"""Logs of events: what readers get, who loses events for want of room, and that nothing stays."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from starlette.types import Message

from vlm_server.api.http.streams.event_log import MAX_READERS, EventLog, Run
from vlm_server.api.http.streams.event_logs import EventLogs
from vlm_server.errors import InternalError, NotFound, RequestCancelled, RequestError
from vlm_server.settings import Server

EVENT = b"data: " + b"x" * 250 + b"\n\n"
LIMIT_BYTES = 20_000


def logs_of(**server: Any) -> EventLogs:
    fields = {
        "max_stream_resume_bytes": LIMIT_BYTES,
        "max_stream_resume_bytes_per_key": LIMIT_BYTES,
    }
    return EventLogs(Server(**(fields | server)), max_waiting=100)


class Stream:
    """A run and its log."""

    def __init__(
        self, logs: EventLogs, name: str, owner: str = "me", *, in_background: bool = False
    ) -> None:
        self.is_stopped = False
        run = Run(owner, name, "openai", in_background, self._last_words, self._stop)
        self.log = logs.open(run)

    def _stop(self) -> None:
        self.is_stopped = True

    def _last_words(self, error: RequestError) -> bytes:
        return b"data: " + error.code.encode() + b"\n\n"

    async def write(self, events: bytes = EVENT, *, is_last: bool = False) -> None:
        await self.log.send(
            {"type": "http.response.body", "body": events, "more_body": not is_last}
        )


class Reader:
    """Follows a log, and has what it got."""

    def __init__(self, log: EventLog, position: int = 0) -> None:
        self.content = b""
        self.is_over = False
        self.task = asyncio.create_task(log.follow(position, self._send))

    async def _send(self, message: Message) -> None:
        self.content += message.get("body", b"")
        self.is_over = not message.get("more_body", True)

    @property
    def num_events(self) -> int:
        return self.content.count(b"\n\n")


async def turns(number: int = 5) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_readers_get_events_from_their_position_once() -> None:
    stream = Stream(logs_of(), "a")
    early = Reader(stream.log)
    for number in range(5):
        await stream.write(b"data: %d\n\n: a comment\n\n" % number)
        await turns(random.randrange(3))
    late = Reader(stream.log, 3)
    await turns()
    await stream.write(b"data: 5\n\ndata: 6\n\n", is_last=True)
    await asyncio.gather(early.task, late.task)
    events = [b"data: %d\nid: a:%d\n\n" % (number, number) for number in range(7)]
    assert early.content.replace(b": a comment\n", b"") == b"".join(events)
    assert late.content == b"".join(events[3:])
    assert early.is_over
    assert late.is_over


async def test_ended_log_takes_no_events() -> None:
    stream = Stream(logs_of(), "a")
    stream.log.cancel(RequestCancelled("Enough."))
    await stream.write()
    stream.log.cancel(InternalError("More."))
    reader = Reader(stream.log)
    await reader.task
    assert reader.content == b"data: request_cancelled\nid: a:0\n\n"
    assert stream.is_stopped


async def test_fifth_reader_dismisses_first() -> None:
    stream = Stream(logs_of(), "a")
    await stream.write()
    readers = [Reader(stream.log) for _ in range(MAX_READERS + 1)]
    await turns()
    assert [reader.is_over for reader in readers] == [True] + [False] * MAX_READERS
    await stream.write(is_last=True)
    await asyncio.gather(*(reader.task for reader in readers))
    assert [reader.num_events for reader in readers[1:]] == [2] * MAX_READERS
    assert stream.log.num_readers == 0


# ---- time ------------------------------------------------------------------------------


async def test_log_lasts_while_read_and_its_time_after() -> None:
    logs = logs_of(stream_resume_keep_seconds=0.5)
    stream = Stream(logs, "a")
    reader = Reader(stream.log)
    await asyncio.sleep(0.7)
    assert not stream.is_stopped
    reader.task.cancel()
    await asyncio.sleep(0.05)
    again = Reader(stream.log)
    await asyncio.sleep(0.7)
    assert not stream.is_stopped
    again.task.cancel()
    await asyncio.sleep(0.7)
    assert stream.is_stopped
    assert (len(logs), logs.size_bytes, logs.num_abandoned) == (0, 0, 1)


async def test_background_log_waits_for_its_end_without_reader() -> None:
    logs = logs_of(stream_resume_keep_seconds=0.05)
    stream = Stream(logs, "a", in_background=True)
    Reader(stream.log).task.cancel()
    await asyncio.sleep(0.15)
    assert not stream.is_stopped
    await stream.write(is_last=True)
    assert logs.find("me", "a") is stream.log
    await asyncio.sleep(0.15)
    assert (len(logs), logs.size_bytes, logs.num_abandoned) == (0, 0, 0)


async def test_owner_with_most_waiting_answers_loses_its_first() -> None:
    logs = EventLogs(Server(), max_waiting=4)
    streams = [Stream(logs, str(number), owner) for number, owner in enumerate("youuuuuu")]
    for stream in streams:
        reader = Reader(stream.log)
        await turns()
        reader.task.cancel()
        await turns()
    assert [stream.is_stopped for stream in streams] == [False] * 2 + [True] * 4 + [False] * 2
    assert logs.num_abandoned == 4


async def test_answers_without_connections_are_counted() -> None:
    logs = logs_of()
    first, second = Stream(logs, "a", in_background=True), Stream(logs, "b", in_background=True)
    assert logs.num_detached == 2
    readers = [Reader(first.log) for _ in range(3)]
    await turns()
    assert logs.num_detached == -1
    await first.write(is_last=True)
    assert logs.num_detached == 1
    await asyncio.gather(*(reader.task for reader in readers))
    await second.write(is_last=True)
    assert logs.num_detached == 0


# ---- room ------------------------------------------------------------------------------


async def test_ended_logs_are_dropped_before_events_of_running_ones() -> None:
    logs = logs_of()
    ended, running = Stream(logs, "ended"), Stream(logs, "running")
    await ended.write(EVENT * 20, is_last=True)
    for _ in range(45):
        await running.write()
    with pytest.raises(NotFound):
        logs.find("me", "ended")
    running.log.check(0, "")
    for _ in range(45):
        await running.write()
    with pytest.raises(NotFound, match="dropped"):
        running.log.check(0, "")
    assert logs.size_bytes <= LIMIT_BYTES


async def test_connected_reader_loses_nothing_for_want_of_room() -> None:
    logs = logs_of(max_stream_resume_bytes=2_000)
    stream = Stream(logs, "a")
    reader = Reader(stream.log)
    await turns()
    await stream.write(EVENT * 100)
    for _ in range(100):
        await stream.write()
        await turns(random.randrange(3))
    await stream.write(is_last=True)
    await reader.task
    assert reader.num_events == 201
    await turns()
    assert logs.size_bytes <= 2_000 + 1_024 + 400


async def test_owner_with_most_bytes_loses_first() -> None:
    logs = logs_of(max_stream_resume_bytes_per_key=15_000)
    mine, yours = Stream(logs, "mine"), Stream(logs, "yours", "you")
    await yours.write(EVENT * 10)
    for _ in range(200):
        await mine.write()
    yours.log.check(0, "")
    with pytest.raises(NotFound, match="dropped"):
        mine.log.check(0, "")
    assert mine.log.size_bytes <= 15_000


async def test_random_use_stays_within_bounds_and_leaves_nothing() -> None:
    logs = logs_of(stream_resume_keep_seconds=0.01, max_stream_resume_bytes_per_key=12_000)
    chance = random.Random(1)
    streams: list[Stream] = []
    for number in range(600):
        owner = chance.choice("abc")
        streams.append(Stream(logs, str(number), owner, in_background=chance.random() < 0.3))
        for stream in chance.sample(streams, min(4, len(streams))):
            await stream.write(EVENT * chance.randrange(4), is_last=chance.random() < 0.3)
            if not stream.log.is_ended and chance.random() < 0.3:
                reader = Reader(stream.log, stream.log.num_events)
                await turns(2)
                if chance.random() < 0.8:
                    reader.task.cancel()
        await turns()
        num_running = sum(not stream.log.is_ended for stream in streams)
        assert logs.size_bytes <= LIMIT_BYTES + 2_048 * num_running
    for stream in streams:
        await stream.write(is_last=True)
    await asyncio.sleep(0.1)
    assert (len(logs), logs.size_bytes) == (0, 0)
    assert (logs._timers, logs._sizes, logs._by_owner) == ({}, {}, {})
