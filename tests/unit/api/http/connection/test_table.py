"""Eviction of connections, deadlines, and turns of parsing."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from vlm_server.api.http.connection.outgoing import Deadline
from vlm_server.api.http.connection.server import RESERVED_FILES, ConnectionLimit
from vlm_server.api.http.connection.table import ConnectionStage, ConnectionTable, ParseQueue


@dataclass(eq=False)
class Connection:
    stage: ConnectionStage
    since: float = 0.0
    is_gone: bool = False

    def evict(self) -> None:
        self.is_gone = True


def test_least_valuable_connection_is_evicted() -> None:
    order = [
        Connection(ConnectionStage.CLOSING, 5),
        Connection(ConnectionStage.SILENT, 1),
        Connection(ConnectionStage.SILENT, 2),
        Connection(ConnectionStage.IDLE, 1),
        Connection(ConnectionStage.HEAD, 1),
        Connection(ConnectionStage.BODY, 1),
        Connection(ConnectionStage.BODY, 3),
    ]
    table = ConnectionTable(lambda: len(order))
    assert all(table.add(connection) for connection in reversed(order))
    for count in range(1, len(order) + 1):
        assert table.add(Connection(ConnectionStage.ANSWER))
        assert [connection.is_gone for connection in order] == [True] * count + [False] * (
            len(order) - count
        )
    late = Connection(ConnectionStage.SILENT)
    assert not table.add(late)
    assert len(table) == len(order)
    table.discard(late)
    assert len(table) == len(order)


def test_lowered_connection_limit_evicts_idle_and_keeps_answers() -> None:
    limit = 6
    table = ConnectionTable(lambda: limit)
    answering = [Connection(ConnectionStage.ANSWER, since) for since in range(2)]
    idle = [Connection(ConnectionStage.IDLE, since) for since in range(4)]
    assert all(table.add(connection) for connection in (*answering, *idle))
    limit = 4
    assert table.make_room()
    assert [connection.is_gone for connection in idle] == [True, True, False, False]
    limit = 1
    late = Connection(ConnectionStage.SILENT)
    assert not table.add(late)
    assert len(table) == len(answering)
    limit = 3
    assert table.add(late)
    assert not any(connection.is_gone for connection in answering)


@pytest.fixture
def files() -> Iterator[Callable[[int], None]]:
    """Set the limit on open files until the end."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda number: resource.setrlimit(resource.RLIMIT_NOFILE, (number, before[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_connection_limit_follows_file_limit(
    files: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    limit = ConnectionLimit(500)
    assert (limit(), caplog.text) == (500, "")
    files(RESERVED_FILES + 20)
    assert [limit(), limit()] == [20, 20]
    assert caplog.text.count("at most 20 connections") == 1
    files(RESERVED_FILES + 1000)
    assert limit() == 500


async def test_deadline_can_be_moved_and_cleared() -> None:
    met: list[float] = []
    loop = asyncio.get_running_loop()
    began = loop.time()
    deadline = Deadline(loop, lambda: met.append(loop.time() - began))
    deadline.set(0.01)
    deadline.set(0.1)
    await asyncio.sleep(0.05)
    assert met == []
    deadline.set(10)
    deadline.set(0.01)
    await asyncio.sleep(0.03)
    assert len(met) == 1
    deadline.set(0.01)
    deadline.clear()
    await asyncio.sleep(0.03)
    deadline.set(0.01)
    deadline.cancel()
    await asyncio.sleep(0.03)
    assert len(met) == 1


async def test_parse_queue_runs_one_slice_per_loop_turn() -> None:
    queue, parsed = ParseQueue(), []

    class Parsing:
        def __init__(self, name: str, slices: int) -> None:
            self.name, self.slices = name, slices

        def parse_slice(self) -> None:
            parsed.append(self.name)
            self.slices -= 1
            if self.slices:
                queue.add(self)

    queue.add(Parsing("a", 3))
    queue.add(Parsing("b", 2))
    for count in range(1, 6):
        await asyncio.sleep(0)
        assert len(parsed) == count
    assert parsed == ["a", "b", "a", "b", "a"]
    await asyncio.sleep(0.01)
    assert len(parsed) == 5
