"""A disconnect ends the work, and its clean-up is complete by then."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from vlm_server.api.http.body import ClientGone, until_disconnect


class Client:
    """An ASGI `receive` that blocks until the client disconnects."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.messages: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive(self) -> Message:
        if self.messages:
            return self.messages.pop()
        await self.left.wait()
        return {"type": "http.disconnect"}


class Work:
    """Runs until cancelled; its clean-up takes some turns of the loop."""

    def __init__(self) -> None:
        self.is_clean = False

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            self.is_clean = True


async def finish(result: int | Exception) -> int:
    await asyncio.sleep(0)
    if isinstance(result, Exception):
        raise result
    return result


async def test_until_disconnect_returns_result_and_raises_error() -> None:
    assert await until_disconnect(Client().receive, finish(5)) == 5
    with pytest.raises(ZeroDivisionError):
        await until_disconnect(Client().receive, finish(ZeroDivisionError()))


async def test_disconnect_cancels_work_and_awaits_cleanup() -> None:
    client, work = Client(), Work()
    asyncio.get_running_loop().call_later(0.01, client.left.set)
    with pytest.raises(ClientGone):
        await until_disconnect(client.receive, work.run())
    assert work.is_clean


async def test_cancellation_cancels_work_and_awaits_cleanup() -> None:
    work = Work()
    task = asyncio.create_task(until_disconnect(Client().receive, work.run()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.is_clean


async def test_until_disconnect_leaves_no_task() -> None:
    before = asyncio.all_tasks()
    await until_disconnect(Client().receive, finish(5))
    assert asyncio.all_tasks() == before


async def test_work_that_goes_on_outlives_its_client() -> None:
    client, gate = Client(), asyncio.Event()
    client.left.set()

    async def work() -> int:
        await gate.wait()
        return 5

    task = asyncio.create_task(until_disconnect(client.receive, work(), lambda: True))
    await asyncio.sleep(0.01)
    assert not task.done()
    gate.set()
    assert await task == 5
