"""Comments fill a silent stream."""

from __future__ import annotations

import asyncio

from starlette.types import Message

from vlm_server.api.http.streams.sse import CONTENT_TYPE, DONE, KEEP_ALIVE, EventStream


async def sent_by(
    stream_for_seconds: list[float], keepalive_seconds: float, event: bytes = b"data: x\n\n"
) -> list[Message]:
    """The ASGI messages of a stream with these pauses before its events."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        await asyncio.sleep(0)
        sent.append(message)

    stream = EventStream(send, CONTENT_TYPE, lambda: KEEP_ALIVE, keepalive_seconds)
    async with stream.kept_alive():
        for seconds in stream_for_seconds:
            await asyncio.sleep(seconds)
            await stream.write(event)
        await stream.end(DONE)
    await asyncio.sleep(2 * keepalive_seconds)
    return sent


async def test_stream_with_events_has_no_comments() -> None:
    sent = await sent_by([0.0, 0.0, 0.0], 0.1)
    assert [message.get("body") for message in sent[1:]] == [b"data: x\n\n"] * 3 + [DONE]


async def test_silent_stream_sends_status_and_comments() -> None:
    sent = await sent_by([0.25, 0.25], 0.05)
    assert sent[0]["type"] == "http.response.start"
    bodies = [message["body"] for message in sent[1:]]
    assert bodies[0] == KEEP_ALIVE
    assert bodies.count(KEEP_ALIVE) >= 4
    assert [body for body in bodies if body != KEEP_ALIVE] == [b"data: x\n\n"] * 2 + [DONE]
    assert bodies[-1] == DONE
    assert [message["more_body"] for message in sent[1:]] == [True] * (len(bodies) - 1) + [False]


async def test_empty_events_count_as_silence() -> None:
    sent = await sent_by([0.02] * 10, 0.05, event=b"")
    bodies = [message["body"] for message in sent[1:]]
    assert bodies.count(KEEP_ALIVE) >= 2
    assert set(bodies) == {KEEP_ALIVE, DONE}
