"""The bytes of all arriving bodies are bounded together."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from vlm_server.api.http import body
from vlm_server.api.http.body import ArrivingBodies
from vlm_server.errors import QueueFull, RequestTimeout
from vlm_server.settings import Limits


class Sender:
    """An ASGI `receive` of the given pieces, then the end or silence."""

    def __init__(self, *pieces: int, ends: bool = False) -> None:
        self.pieces = list(pieces)
        self.ends = ends

    async def receive(self) -> Message:
        if self.pieces:
            size = self.pieces.pop(0)
            return {"type": "http.request", "body": b"x" * size, "more_body": True}
        if not self.ends:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": b"", "more_body": False}


def read(sender: Sender, arriving: ArrivingBodies, seconds: float = 5) -> asyncio.Task[bytearray]:
    limits = Limits(body_timeout_seconds=seconds)
    return asyncio.create_task(body.read(sender.receive, limits, arriving))


async def test_slowest_arriving_body_is_refused_for_new_ones() -> None:
    arriving = ArrivingBodies(10_000)
    slow = read(Sender(4000), arriving)
    await asyncio.sleep(0.1)
    quick = [read(Sender(3500, ends=True), arriving) for _ in range(3)]
    assert [len(await reading) for reading in quick] == [3500] * 3
    assert not slow.done()
    large = read(Sender(7000), arriving)
    with pytest.raises(QueueFull):
        await slow
    assert not large.done()
    large.cancel()


async def test_finished_bodies_free_their_bytes() -> None:
    arriving = ArrivingBodies(10_000)
    for _ in range(5):
        assert len(await read(Sender(9000, ends=True), arriving)) == 9000
        with pytest.raises(RequestTimeout):
            await read(Sender(9000), arriving, seconds=0.01)
