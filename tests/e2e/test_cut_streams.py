"""Streams of a real daemon, cut at random bytes and resumed: no token is lost or doubled.

A cut closes the socket after a random byte of the response, its head included. The client then has
the complete events before it, and goes on after the last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import h11
import pytest

from tests.support.daemons import Daemon, wait_until

pytestmark = pytest.mark.e2e

TOKENS = 40
_EVENT_BYTES = 260
_ID = re.compile(rb"\nid: (\S+)$")


@dataclass
class Received:
    """What a client has of a stream."""

    stream_id: str = ""
    events: list[bytes] = field(default_factory=list)
    is_whole: bool = False
    num_cuts: int = 0
    num_restarts: int = 0
    """How often the cut was before the client knew its stream's id."""

    def add(self, content: bytes) -> None:
        """Add the complete events of `content`, whose rest is lost."""
        *blocks, _ = content.split(b"\n\n")
        for block in blocks:
            lines = [line for line in block.split(b"\n") if not line.startswith(b":")]
            self.events.append(b"\n".join(lines))

    @property
    def last_id(self) -> str:
        if not self.events:
            return self.stream_id
        match = _ID.search(self.events[-1])
        assert match is not None, self.events[-1]
        return match[1].decode()

    def payloads(self) -> Iterator[Any]:
        for event in self.events:
            data = next(line for line in event.split(b"\n") if line.startswith(b"data: "))
            yield None if data == b"data: [DONE]" else json.loads(data.removeprefix(b"data: "))


@dataclass(frozen=True)
class Dialect:
    """A streaming route: its body, and the text and number of terminal events of an answer."""

    path: str
    fields: Callable[[str], dict[str, Any]]
    text: Callable[[Any], str]
    is_terminal: Callable[[Any], bool]


def _messages(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": TOKENS}


def _chat_text(event: Any) -> str:
    return "".join(choice["delta"].get("content", "") for choice in event["choices"])


DIALECTS = (
    Dialect("/v1/chat/completions", _messages, _chat_text, lambda event: event is None),
    Dialect(
        "/v1/completions",
        lambda prompt: {"prompt": prompt, "max_tokens": TOKENS},
        lambda event: "".join(choice["text"] for choice in event["choices"]),
        lambda event: event is None,
    ),
    Dialect(
        "/v1/messages",
        _messages,
        lambda event: event.get("delta", {}).get("text", ""),
        lambda event: event["type"] == "message_stop",
    ),
    Dialect(
        "/v1/responses",
        lambda prompt: {"input": prompt, "max_output_tokens": TOKENS, "background": True},
        lambda event: event["delta"] if event["type"].endswith("text.delta") else "",
        lambda event: (
            event is not None and event["type"] in ("response.completed", "response.incomplete")
        ),
    ),
)


@dataclass(frozen=True)
class Client:
    """Reads streams of the daemon on `port`; `random` decides where a connection is cut."""

    port: int
    random: random.Random

    async def read(self, dialect: Dialect, prompt: str, cut_chance: float) -> Received:
        """The answer, over as many connections as it takes."""
        received = Received()
        fields = {"model": "model", "stream": True, "temperature": 0} | dialect.fields(prompt)
        while not received.is_whole:
            request = self._request(dialect, fields, received)
            is_cut = self.random.random() < cut_chance
            last_byte = self.random.randrange(1, TOKENS * _EVENT_BYTES) if is_cut else None
            await self._connect(request, received, last_byte)
        return received

    def _request(self, dialect: Dialect, fields: dict[str, Any], received: Received) -> bytes:
        headers = [("Host", "127.0.0.1"), ("Content-Type", "application/json")]
        method, path, body = "POST", dialect.path, json.dumps(fields).encode()
        if not received.stream_id:
            headers.append(("X-VLM-Resumable", "true"))
        elif "background" in fields and received.events:
            number = len(received.events) - 1  # as their `sequence_number`
            path += f"/resp_{received.stream_id}?stream=true&starting_after={number}"
            method, body = "GET", b""
        else:
            headers.append(("Last-Event-ID", received.last_id))
        headers.append(("Content-Length", str(len(body))))
        connection = h11.Connection(h11.CLIENT)
        request = connection.send(h11.Request(method=method, target=path, headers=headers))
        assert request is not None
        return request + body

    async def _connect(self, request: bytes, received: Received, last_byte: int | None) -> None:
        """Read a response up to `last_byte`, where the connection is closed or reset."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request)
            num_bytes, content, http = 0, b"", h11.Connection(h11.CLIENT)
            http.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
            http.send(h11.EndOfMessage())
            while not received.is_whole:
                left = 1 << 16 if last_byte is None else last_byte - num_bytes
                data = await reader.read(min(left, self.random.randrange(1, 4096))) if left else b""
                if not data:
                    break
                num_bytes += len(data)
                http.receive_data(data)
                content += self._body(http, received)
            received.add(content)
            if not received.is_whole:
                assert last_byte == num_bytes, "the daemon has cut the stream itself"
                received.num_cuts += 1
                received.num_restarts += not received.stream_id
        finally:
            self._close(writer)

    def _body(self, http: h11.Connection, received: Received) -> bytes:
        """The body in what has arrived."""
        content = b""
        while (event := http.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            match event:
                case h11.Response():
                    assert event.status_code == 200, event
                    headers = dict(event.headers)
                    received.stream_id = received.stream_id or headers[b"x-request-id"].decode()
                case h11.Data():
                    content += event.data
                case h11.EndOfMessage():
                    received.is_whole = True
        return content

    def _close(self, writer: asyncio.StreamWriter) -> None:
        if self.random.random() < 0.5:  # as a machine that goes away, instead of saying so
            linger = struct.pack("ii", 1, 0)
            raw = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()


def check_equal(dialect: Dialect, cut: Received, uncut: Received) -> None:
    """Assert that a cut stream has each event once, and the uncut one's text and end."""
    numbers = [int(event.rpartition(b":")[2]) for event in cut.events]
    assert numbers == list(range(len(uncut.events)))
    cut_payloads, uncut_payloads = list(cut.payloads()), list(uncut.payloads())
    for payloads in (cut_payloads, uncut_payloads):
        assert sum(map(dialect.is_terminal, payloads)) == 1
    texts = [
        [dialect.text(payload) for payload in payloads if payload is not None]
        for payloads in (cut_payloads, uncut_payloads)
    ]
    assert texts[0] == texts[1]
    assert "".join(texts[0])


async def cut_streams(port: int, num_cuts: int, seed: int) -> tuple[int, int]:
    """Cut streams until there were `num_cuts`; returns the cuts, and the streams read."""
    done, num_streams = 0, 0

    async def work(worker: int) -> None:
        nonlocal done, num_streams
        client = Client(port, random.Random(f"{seed} {worker}"))
        while done < num_cuts:
            dialect = client.random.choice(DIALECTS)
            prompt = f"Tell me of ship {client.random.randrange(10)}."
            cut = await client.read(dialect, prompt, cut_chance=0.8)
            check_equal(dialect, cut, await client.read(dialect, prompt, cut_chance=0))
            done += cut.num_cuts
            num_streams += 1

    async with asyncio.TaskGroup() as group:
        for worker in range(8):
            group.create_task(work(worker))
    return done, num_streams


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_cuts", [50, pytest.param(1000, marks=pytest.mark.whole)])
def test_randomly_cut_streams_lose_and_double_nothing(tiny_daemon: Daemon, num_cuts: int) -> None:
    before = tiny_daemon.metrics()["resumed_streams_total"]
    done, num_streams = asyncio.run(cut_streams(tiny_daemon.port, num_cuts, seed=num_cuts))
    resumed = tiny_daemon.metrics()["resumed_streams_total"] - before
    print(f"{done} cuts of {num_streams} streams, {resumed:.0f} times resumed")
    assert done >= num_cuts
    assert resumed > 0.7 * done
    wait_until(lambda: tiny_daemon.num_in_flight() == 0, 90, tiny_daemon.log)
