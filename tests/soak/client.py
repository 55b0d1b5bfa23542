"""Sends one request as its user would, and checks the response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

import httpx
import msgspec

from tests.soak.request import Ending, Outcome, Patience, Request
from vlm_server.cli.client.answer import read_answer
from vlm_server.cli.client.chat import ChatClient

TIMEOUT_SECONDS = 120.0
"""A request that takes longer has failed."""
_UPLOAD_PAUSE_SECONDS = 0.05
_MAX_ERROR_CHARS = 300


class _Left(Exception):
    """The user closed the connection."""


class _Error(msgspec.Struct):
    code: str


class _Refused(msgspec.Struct):
    error: _Error


class _Message(msgspec.Struct):
    content: str


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class _Reply(msgspec.Struct, frozen=True):
    """`received`: (seconds since the request was sent, bytes)."""

    status: int
    received: list[tuple[float, bytes]]
    retry_after_seconds: float

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.received)


class Client:
    """Asks the server at `url`, which does not end in `/v1`. Every request gives an `Outcome`."""

    def __init__(self, url: str) -> None:
        self._chat = ChatClient(f"{url}/v1", api_key=None, timeout=None, trust_env=False)
        self.waits = 0
        """How often a request had to wait because the queue was full."""

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

    async def send(self, request: Request) -> Outcome:
        """Send `request`, again after Retry-After while the queue is full."""
        try:
            while (reply := await self._reply(request)).status == 429:
                self.waits += 1
                await asyncio.sleep(reply.retry_after_seconds)
        except _Left:
            return Outcome(kind=request.kind, ending=Ending.LEFT)
        except TimeoutError:
            return _failure(request, None, f"no end within {TIMEOUT_SECONDS:g} seconds")
        except httpx.HTTPError as error:
            return _failure(request, None, f"{type(error).__name__}: {error}")
        return _judge(request, reply)

    async def _reply(self, request: Request) -> _Reply:
        """Raises _Left, TimeoutError, httpx.HTTPError."""
        patience = request.patience
        received: list[tuple[float, bytes]] = []
        body = request.body
        try:
            async with (
                asyncio.timeout(min(patience.seconds, TIMEOUT_SECONDS)),
                self._chat.post(_upload(body, patience), len(body)) as response,
            ):
                async for piece in response.received():
                    received.append(piece)
                    if len(received) >= patience.reads:
                        raise _Left
        except TimeoutError:
            if patience.seconds < TIMEOUT_SECONDS:
                raise _Left from None
            raise
        retry_after_seconds = float(response.headers.get("Retry-After", 1))
        return _Reply(response.status, received, retry_after_seconds)


async def _upload(body: bytes, patience: Patience) -> AsyncIterator[bytes]:
    """Raises _Left after `upload_share` of the body, unless that is all of it."""
    yield body[: int(len(body) * patience.upload_share)]
    if patience.upload_share < 1:
        await asyncio.sleep(_UPLOAD_PAUSE_SECONDS)
        raise _Left


def _judge(request: Request, reply: _Reply) -> Outcome:
    if request.refusal is not None:
        return _judge_refusal(request, reply)
    if reply.status != 200:
        return _failure(request, reply.status, reply.body.decode(errors="replace"))
    if request.is_stream:
        answer = read_answer(reply.received, reply.received[-1][0] if reply.received else 0.0)
        if answer.error is not None:
            return _failure(request, 200, answer.error)
        return _answered(request, answer.text, answer.ttft)
    try:
        completion = msgspec.json.decode(reply.body, type=_Completion)
    except msgspec.DecodeError as error:
        return _failure(request, 200, f"not a chat completion: {error}")
    return _answered(request, completion.choices[0].message.content if completion.choices else "")


def _judge_refusal(request: Request, reply: _Reply) -> Outcome:
    wanted = request.refusal
    assert wanted is not None
    said = reply.body.decode(errors="replace")
    try:
        code = msgspec.json.decode(reply.body, type=_Refused).error.code
    except msgspec.DecodeError:
        code = ""
    if (reply.status, code) != (wanted.status, wanted.code):
        return _failure(
            request, reply.status, f"expected {wanted.status} {wanted.code}, got: {said}"
        )
    return Outcome(kind=request.kind, ending=Ending.REFUSED, status=reply.status)


def _answered(request: Request, text: str, ttft: float | None = None) -> Outcome:
    return Outcome(kind=request.kind, ending=Ending.ANSWERED, status=200, text=text, ttft=ttft)


def _failure(request: Request, status: int | None, reason: str) -> Outcome:
    error = reason[:_MAX_ERROR_CHARS]
    return Outcome(kind=request.kind, ending=Ending.FAILED, status=status, error=error)
