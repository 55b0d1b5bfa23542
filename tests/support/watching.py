"""A client of `/v1/watch`: opens one, gives it frames, and reads its events in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from PIL import Image

from tests.support.image_files import encoded

Event = dict[str, Any]
SECONDS = 30.0


class Watching:
    """An open watch. `events` are those that have come so far."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.events: list[Event] = []
        self._news = asyncio.Event()

    @property
    def id(self) -> str:
        return str(self.events[0]["watch_id"])

    async def frame(self, data: bytes, **query: Any) -> httpx.Response:
        headers = {"Content-Type": "image/jpeg"}
        path = f"/v1/watch/{self.id}/frames"
        return await self.client.post(path, content=data, headers=headers, params=query)

    async def give(self, data: bytes, **query: Any) -> dict[str, Any]:
        """Give a frame, which is taken; returns what is said of it."""
        response = await self.frame(data, **query)
        assert response.status_code == 200, response.text
        taken: dict[str, Any] = response.json()
        return taken

    async def delete(self) -> httpx.Response:
        return await self.client.delete(f"/v1/watch/{self.id}")

    async def until(self, kind: str, number: int = 1) -> Event:
        """The event number `number` of a type, from 1, once it is there."""
        async with asyncio.timeout(SECONDS):
            while len(found := [e for e in self.events if e["type"] == kind]) < number:
                await self._news.wait()
                self._news.clear()
        return found[number - 1]

    async def read(self, response: httpx.Response) -> None:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                self.events.append(json.loads(line.removeprefix("data: ")))
                self._news.set()


@asynccontextmanager
async def watching(client: httpx.AsyncClient, **body: Any) -> AsyncIterator[Watching]:
    """A watch that is left at the end of the block, if it has not ended."""
    async with client.stream("POST", "/v1/watch", json=body) as response:
        if response.status_code != 200:
            await response.aread()
        assert response.status_code == 200, response.text
        watch = Watching(client)
        reading = asyncio.create_task(watch.read(response))
        try:
            await watch.until("started")
            yield watch
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


def plain(colour: str, size: int = 32) -> bytes:
    """A JPEG of one colour."""
    return encoded(Image.new("RGB", (size, size), colour), "JPEG")
