"""Cameras whose frames come in the request's own body, while its events are sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.watching import plain
from tests.unit.api.conftest import listening
from tests.unit.api.dialects.openai.watch.test_watch import says
from tests.unit.api.scripted_engine import ScriptedEngine, never
from vlm_server.settings import Limits, Settings, WatchSettings

QUESTION = json.dumps({"question": "?"}).encode()


class CameraSocket:
    """A client that sends parts and reads events at a time, which httpx does not."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def begin(self, content_type: str = "multipart/x-mixed-replace; boundary=f") -> None:
        head = (
            "POST /v1/watch HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: {content_type}\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        self.writer.write(head.encode())

    def send(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    def part(self, content: bytes, kind: str = "image/jpeg") -> None:
        head = b"--f\r\nContent-Type: %s\r\nContent-Length: %d" % (kind.encode(), len(content))
        self.send(head + b"\r\n\r\n" + content + b"\r\n")

    def end(self) -> None:
        self.send(b"--f--\r\n")
        self.writer.write(b"0\r\n\r\n")

    async def status(self) -> int:
        async with asyncio.timeout(20):
            return int((await self.reader.readuntil(b"\r\n")).split()[1])

    async def event(self) -> dict[str, Any]:
        async with asyncio.timeout(20):
            while True:
                line = await self.reader.readuntil(b"\n")
                if line.startswith(b"data: "):
                    event: dict[str, Any] = json.loads(line[6:])
                    return event


@asynccontextmanager
async def camera(engine: ScriptedEngine, **watch: Any) -> AsyncIterator[CameraSocket]:
    settings = Settings(
        watch=WatchSettings(**watch), limits=Limits(body_timeout_seconds=1, max_image_bytes=50_000)
    )
    async with listening(engine, settings) as port:
        client = CameraSocket(*await asyncio.open_connection("127.0.0.1", port))
        try:
            yield client
        finally:
            client.writer.transport.abort()


async def test_events_come_while_body_goes_on() -> None:
    engine = ScriptedEngine(*says("one"))
    async with camera(engine) as client:
        client.begin()
        client.part(QUESTION, "application/json")
        assert await client.status() == 200
        assert (await client.event())["type"] == "started"
        client.part(plain("red"))
        first = await client.event()
        assert (first["answer"], first["frame"]["number"]) == ("one", 1)
        client.part(b"no picture")
        assert (await client.event())["code"] == "invalid_image"
        engine.script = says("two")
        client.part(plain("blue"))
        client.end()
        second = await client.event()
        assert (second["answer"], second["previous"]["answer"]) == ("two", "one")
        end = await client.event()
        assert (end["type"], end["reason"]) == ("end", "body_ended")
        assert end["frames"]["asked"] == 2
        assert end["frames"]["failed"] == 1
        assert b"data:" not in await client.reader.read()


async def test_frames_faster_than_rate_are_skipped() -> None:
    engine = ScriptedEngine(*says("one"))
    async with camera(engine, max_frames_per_second=1.0) as client:
        client.begin()
        client.part(QUESTION, "application/json")
        for colour in ("red", "blue", "green", "black", "yellow"):
            client.part(plain(colour))
        client.end()
        events = [await client.event()]
        while events[-1]["type"] != "end":
            events.append(await client.event())
    frames = events[-1]["frames"]
    assert frames["received"] == 5
    assert frames["asked"] + frames["skipped"] == 5
    assert frames["skipped"] >= 3


@pytest.mark.parametrize("is_complete", [False, True])
async def test_camera_that_leaves_ends_its_watch(is_complete: bool) -> None:
    """Also after its last frame, of which it does not wait for the answer."""
    engine = ScriptedEngine(never())
    async with camera(engine) as client:
        client.begin()
        client.part(QUESTION, "application/json")
        client.part(plain("red"))
        client.part(plain("blue"))
        if is_complete:
            client.end()
        await engine.waiting.wait()
        await asyncio.sleep(0.1)
        client.writer.transport.abort()
        async with asyncio.timeout(10):
            await engine.closed.wait()
    assert len(engine.aborted) == 1


async def test_body_at_fault_in_mid_stream_ends_watch_with_error() -> None:
    async with camera(ScriptedEngine(*says("one"))) as client:
        client.begin()
        client.part(QUESTION, "application/json")
        assert (await client.event())["type"] == "started"
        client.part(b"\xff\xd8" + bytes(60_000))
        end = await client.event()
        assert (end["reason"], end["error"]["code"]) == ("failed", "payload_too_large")


@pytest.mark.parametrize(
    ("content_type", "body", "status"),
    [
        ("multipart/x-mixed-replace", b"", 415),
        ("multipart/mixed; boundary=f", b"", 408),
        ("multipart/mixed; boundary=f", b"--f--\r\n", 400),
        ("multipart/mixed; boundary=f", b"x" * 20_000, 400),
        ("multipart/mixed; boundary=f", b"--f\r\n\r\n{}\r\n--f", 400),
        ("multipart/mixed; boundary=f", b"--f\r\n\r\nno JSON\r\n--f", 400),
    ],
)
async def test_wrong_beginnings_are_refused(content_type: str, body: bytes, status: int) -> None:
    async with camera(ScriptedEngine()) as client:
        client.begin(content_type)
        if body:
            client.send(body)
        assert await client.status() == status
