"""A camera: a multipart body, of a request that begins with the question, or of a URL."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.types import Receive

from vlm_server.api.dialects.openai.watch import events
from vlm_server.api.dialects.openai.watch.frame_queue import Stamp
from vlm_server.api.dialects.openai.watch.parts import PartReader
from vlm_server.api.dialects.openai.watch.watch import Watch
from vlm_server.api.http.body import ClientGone
from vlm_server.errors import InvalidRequest, QueueFull, RequestError, RequestTimeout
from vlm_server.settings import Limits

Give = Callable[[bytes], Awaitable[tuple[Stamp, float]]]
Write = Callable[[bytes], Awaitable[None]]


class Camera:
    """Reads parts as fast as they come, so that the newest is new; those in between are skipped."""

    def __init__(self, receive: Receive, boundary: bytes, limits: Limits) -> None:
        self._receive = receive
        self._parts = PartReader(boundary, limits.max_image_bytes)
        self._limits = limits
        self._newest: bytes | None = None
        self._has_news = asyncio.Event()
        self._is_over = False
        self._pending: list[bytes] = []
        """Parts that came with the first."""

    async def first_part(self) -> bytearray:
        """The question's JSON. Raises RequestError and ClientGone."""
        seconds = self._limits.body_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                while not self._pending:
                    self._pending += await self._next_parts()
                    if self._is_over and not self._pending:
                        raise InvalidRequest("The multipart body has no part.")
        except TimeoutError:
            raise RequestTimeout(
                f"The first part did not arrive within {seconds:g} seconds "
                "(limits.body_timeout_seconds)."
            ) from None
        return bytearray(self._pending.pop(0))

    async def feed(self, watch: Watch, give: Give, write: Write) -> None:
        """Give `watch` the frames until the body ends; then wait for its answer, and end it.

        Raises ClientGone.
        """
        tasks = [asyncio.create_task(self._give_newest(watch, give, write))]
        tasks[0].add_done_callback(watch.end_if_failed)
        try:
            await self._read(watch)
            self._has_news.set()
            tasks.append(asyncio.create_task(self._finish(watch, tasks[0])))
            while (await self._receive())["type"] != "http.disconnect":
                pass
            raise ClientGone
        except RequestError as error:
            watch.end("failed", error)
            await asyncio.Event().wait()  # the end is being written
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _finish(self, watch: Watch, giving: asyncio.Task[None]) -> None:
        """End `watch` once its last frame is answered."""
        await giving
        await watch.until_asked()
        watch.end("body_ended")

    async def _read(self, watch: Watch) -> None:
        parts, self._pending = self._pending, []
        while True:
            for part in parts:
                if self._newest is not None:
                    watch.frames.counts.received += 1
                    watch.frames.counts.skipped += 1
                self._newest = part
                self._has_news.set()
            if self._is_over:
                return
            parts = await self._next_parts()

    async def _next_parts(self) -> list[bytes]:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts = list(self._parts.feed(message.get("body", b"")))
        self._is_over = self._parts.is_over or not message.get("more_body", False)
        return parts

    async def _give_newest(self, watch: Watch, give: Give, write: Write) -> None:
        """Frames that come too fast are skipped; those that can't be read are said once."""
        trouble = ""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            frame, self._newest = self._newest, None
            if frame is None:
                if self._is_over:
                    return
                continue
            try:
                await give(frame)
                trouble = ""
            except QueueFull:
                watch.frames.counts.received += 1
                watch.frames.counts.skipped += 1
            except RequestError as error:
                if error.code != trouble:
                    trouble = error.code
                    message = f"{error.message} The frame is left out."
                    await write(events.noticed(error.code, message))
            if self._is_over:
                self._has_news.set()
