"""Sends a scenario's requests to one server and collects the answers with their times.

While an answer arrives, only the time of each read is noted; it is parsed when it is complete,
so that parsing one answer does not delay the times of another.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec

from vlm_server.cli.bench.scenarios.material import Message
from vlm_server.cli.client import routing_key
from vlm_server.cli.client.answer import Answer, failed, read_answer
from vlm_server.cli.client.chat import ChatClient

_STATUS_SECONDS = 10.0
_STATUS_DELAY_SECONDS = 0.2
"""How late the engine may tell what it has done; once it has nothing to do, it tells at once."""


class Target(msgspec.Struct, frozen=True):
    """A server to ask: `base_url` ends in `/v1`; `model` is the name that requests carry."""

    name: str
    base_url: str
    model: str


class Client:
    """Asks one target. Every request gives an `Answer`, stored until `take_answers`."""

    def __init__(self, target: Target, timeout_seconds: float) -> None:
        self.target = target
        self._timeout_seconds = timeout_seconds
        self._answers: list[Answer] = []
        self._chat = ChatClient(target.base_url, api_key=None, timeout=None, trust_env=False)

    async def __aenter__(self) -> Self:
        await self._chat.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._chat.__aexit__(kind, error, trace)

    async def ask(self, messages: list[Message], max_tokens: int, key: str = "") -> Answer:
        """Stream one greedy answer of at most `max_tokens`; failures are answers too.

        `key` is that of the conversation, for one that has lost what its key was made of.
        """
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
        answer = await self._send(body, key or routing_key.of_messages(messages))
        self._answers.append(answer)
        return answer

    async def num_clears(self) -> int | None:
        """How often the target has given freed device memory back; None if it does not say.

        To be called while it answers nothing.
        """
        await asyncio.sleep(_STATUS_DELAY_SECONDS)
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=_STATUS_SECONDS) as http:
                response = await http.get(f"{self.target.base_url}/status")
                told: Any = response.raise_for_status().json()
                decisions: dict[str, int] = told["engine"]["stats"]["memory"]["decisions"]
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return None  # another kind of server
        return sum(times for kind, times in decisions.items() if kind.startswith("clear_"))

    def take_answers(self) -> list[Answer]:
        """All answers since the last call, in the order they ended."""
        taken, self._answers = self._answers, []
        return taken

    async def _send(self, body: bytes, key: str) -> Answer:
        clock = time.perf_counter
        sent = clock()
        try:
            async with (
                asyncio.timeout(self._timeout_seconds),
                self._chat.post(body, len(body), key) as response,
            ):
                received = [each async for each in response.received()]
        except TimeoutError:
            return failed(f"no end within {self._timeout_seconds:g} seconds", clock() - sent)
        except httpx.HTTPError as error:
            return failed(f"{type(error).__name__}: {error}", clock() - sent)
        seconds = clock() - sent
        if response.status != 200:
            said = b"".join(data for _, data in received).decode(errors="replace")
            return failed(f"HTTP {response.status}: {said}", seconds)
        return read_answer(received, seconds)
