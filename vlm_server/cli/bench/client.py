"""Asks one server over HTTP and notes when bytes come. Knows httpx; knows no scenario.

While an answer comes, nothing but the time of each piece of bytes is noted; they are read
when it is complete, so that one answer's reading hardly delays another's time.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Self

import httpx
import msgspec

from vlm_server.cli.bench.answer import Answer, failed, read_answer
from vlm_server.cli.bench.material import Message

_KEEPALIVE_SECONDS = 2.0
"""Shorter than the 5 seconds of common servers: no request meets a connection being closed."""


class Target(msgspec.Struct, frozen=True):
    """A server to ask: `base_url` ends in `/v1`; `model` is what its requests name."""

    name: str
    base_url: str
    model: str


class Client:
    """Asks one target. Every request ends in an `Answer`, kept in `answers` until taken."""

    def __init__(self, target: Target, timeout_seconds: float) -> None:
        self.target = target
        self._timeout_seconds = timeout_seconds
        self._answers: list[Answer] = []
        self._http = httpx.AsyncClient(
            timeout=None,  # noqa: S113  the whole request has one
            trust_env=False,
            headers={"Content-Type": "application/json"},
            limits=httpx.Limits(
                max_connections=None,
                max_keepalive_connections=None,
                keepalive_expiry=_KEEPALIVE_SECONDS,
            ),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def ask(self, messages: list[Message], max_tokens: int) -> Answer:
        """Stream one greedy answer of at most `max_tokens`; failures are answers too."""
        body = msgspec.json.encode(
            {
                "model": self.target.model,
                "messages": messages,
                "max_tokens": max_tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        answer = await self._send(body)
        self._answers.append(answer)
        return answer

    def take_answers(self) -> list[Answer]:
        """All answers since the last call, in the order they ended."""
        taken, self._answers = self._answers, []
        return taken

    async def _send(self, body: bytes) -> Answer:
        pieces: list[tuple[float, bytes]] = []
        url = f"{self.target.base_url}/chat/completions"
        clock = time.perf_counter
        sent = clock()
        try:
            async with (
                asyncio.timeout(self._timeout_seconds),
                self._http.stream("POST", url, content=body) as response,
            ):
                async for piece in response.aiter_raw():
                    pieces.append((clock() - sent, piece))  # noqa: PERF401  kept when it breaks off
        except TimeoutError:
            return failed(f"no end within {self._timeout_seconds:g} seconds", clock() - sent)
        except httpx.HTTPError as error:
            return failed(f"{type(error).__name__}: {error}", clock() - sent)
        seconds = clock() - sent
        if response.status_code != 200:
            said = b"".join(piece for _, piece in pieces).decode(errors="replace")
            return failed(f"HTTP {response.status_code}: {said}", seconds)
        return read_answer(pieces, seconds)
