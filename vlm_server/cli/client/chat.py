"""Sends a chat completion request and gives the response's bytes with their arrival times.

Nothing is parsed here: `answer` does that, while the bytes arrive (`ask`) or afterwards (`bench`,
where parsing one answer must not delay the times of another).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

import httpx

from vlm_server.cli.client.keys import authorization
from vlm_server.cli.client.routing_key import HEADER

_KEEPALIVE_SECONDS = 2.0
"""Shorter than the 5 seconds of common servers, so that no request is sent on a connection that
the server is closing."""


class Response:
    """The response to one request. `received` may be iterated once."""

    def __init__(self, response: httpx.Response, sent: float) -> None:
        self._response = response
        self._sent = sent
        self.status = response.status_code
        self.headers = response.headers

    async def received(self) -> AsyncIterator[tuple[float, bytes]]:
        """The body's bytes as they arrive, each with the seconds since the request was sent.

        Raises httpx.HTTPError if the connection breaks.
        """
        async for data in self._response.aiter_raw():
            yield time.perf_counter() - self._sent, data


class ChatClient:
    """Sends chat completion requests to the server at `base_url`, which ends in `/v1`.

    `timeout` is httpx's, None for no limit. `trust_env` is whether proxies of the environment
    are used.
    """

    def __init__(
        self, base_url: str, *, api_key: str | None, timeout: httpx.Timeout | None, trust_env: bool
    ) -> None:
        headers = {b"Content-Type": b"application/json", b"Accept-Encoding": b"identity"}
        self._url = f"{base_url}/chat/completions"
        self._http = httpx.AsyncClient(
            timeout=timeout,
            trust_env=trust_env,
            headers=headers | authorization(api_key),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEEPALIVE_SECONDS),
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

    @asynccontextmanager
    async def post(
        self, content: bytes | AsyncIterable[bytes], num_bytes: int, key: str = ""
    ) -> AsyncIterator[Response]:
        """The response to a body of `num_bytes`; leaving the block early closes the connection.

        `key` is its conversation's, see `routing_key`; without one a gateway chooses as it likes.
        Raises httpx.HTTPError, and what iterating `content` raises.
        """
        sent = time.perf_counter()
        headers = {"Content-Length": str(num_bytes), **({HEADER: key} if key else {})}
        async with self._http.stream(
            "POST", self._url, content=content, headers=headers
        ) as response:
            yield Response(response, sent)
