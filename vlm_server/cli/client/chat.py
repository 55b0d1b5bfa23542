"""Chat completion requests over HTTP: the response's bytes with their times, or its chunks."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import takewhile
from typing import Any, Self

import httpx

from vlm_server.cli.client.answer import AnswerProgress, Chunk, ChunkReader, error_message
from vlm_server.cli.client.daemon import Daemon, authorization, refusal, why_silent
from vlm_server.cli.exit_codes import CommandFailed

HEADER = "X-SMG-Routing-Key"
_PROGRESS_HEADER = {"X-VLM-Progress": "1"}
_CONNECT_SECONDS = 10.0
_BUSY = (429, 503)
_KEEPALIVE_SECONDS = 2.0
"""Time for which idle connections are reused: less than the 5 seconds after which common servers
close them."""


class DaemonBusy(CommandFailed):
    """The daemon has no place in its queue for a request, or its model is not loaded."""


class Response:
    """The response to one request. `received` may be iterated once."""

    def __init__(self, response: httpx.Response, sent_at: float) -> None:
        self._response = response
        self._sent = sent_at
        self.status = response.status_code
        self.headers = response.headers

    async def received(self) -> AsyncIterator[tuple[float, bytes]]:
        """Bytes as they arrive, and seconds since the request was sent. Raises httpx.HTTPError."""
        async for data in self._response.aiter_raw():
            yield time.perf_counter() - self._sent, data


class ChatClient:
    """A client of the server at `base_url`, which ends in `/v1`; the other options are httpx's."""

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

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    @asynccontextmanager
    async def post(
        self,
        content: bytes | AsyncIterable[bytes],
        num_bytes: int,
        key: str = "",
        *,
        tells_progress: bool = False,
    ) -> AsyncIterator[Response]:
        """The response to a body of `num_bytes`; leaving the block early closes the connection.

        `key` is the conversation's `routing_key`. `tells_progress` asks for comments on progress.
        Raises httpx.HTTPError, and as `content`.
        """
        sent_at = time.perf_counter()
        headers = {"Content-Length": str(num_bytes), **({HEADER: key} if key else {})}
        headers |= _PROGRESS_HEADER if tells_progress else {}
        stream = self._http.stream("POST", self._url, content=content, headers=headers)
        async with stream as response:
            yield Response(response, sent_at)


async def stream_chunks(
    daemon: Daemon,
    body: bytes,
    key: str = "",
    on_progress: Callable[[AnswerProgress], None] | None = None,
) -> AsyncGenerator[Chunk, None]:
    """The chunks of the answer to a request with `"stream": true`, without a time limit.

    `key` is the conversation's `routing_key`. `on_progress` is told what a silent answer waits for.
    Raises CommandFailed.
    """
    client = ChatClient(
        daemon.url,
        api_key=daemon.api_key,
        timeout=httpx.Timeout(_CONNECT_SECONDS, read=None),
        trust_env=daemon.trust_env,
    )
    try:
        post = client.post(body, len(body), key, tells_progress=on_progress is not None)
        async with client, post as response:
            if response.status != 200:
                text = b"".join([data async for _, data in response.received()])
                kind = DaemonBusy if response.status in _BUSY else CommandFailed
                raise kind(refusal(response.status, text))
            reader = ChunkReader()
            async for _, data in response.received():
                chunks = reader.feed(data)
                if on_progress is not None and not chunks and reader.progress is not None:
                    on_progress(reader.progress)
                for chunk in chunks:
                    if chunk.error is not None:
                        raise CommandFailed(error_message(chunk.error))
                    yield chunk
            if not reader.has_ended:
                raise CommandFailed("the answer ended before it was complete")
    except httpx.HTTPError as error:
        raise CommandFailed(why_silent(daemon.url, error)) from None


def routing_key(messages: Sequence[dict[str, Any]]) -> str:
    """The key by which a gateway sends all turns of a conversation to one worker, in hex.

    The SHA-256 of the first image, video or document, if there is one before the first answer, else
    of the messages until then. For an image in a data URL it equals the daemon's own
    (`api.parsing.routing_key`), so that other clients with that image find it cached.
    """
    opening = list(takewhile(lambda message: message["role"] != "assistant", messages))
    contents = [message["content"] for message in opening]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    kinds = ("image_url", "video_url")
    urls = [part[kind]["url"] for kind in kinds for part in parts if part["type"] == kind]
    urls += [part["file"]["file_data"] for part in parts if part["type"] == "file"]
    key_bytes = json.dumps(opening).encode()
    if urls:
        head, _, content = urls[0].partition(";base64,")
        key_bytes = base64.b64decode(content) if head.startswith("data:") else urls[0].encode()
    return hashlib.sha256(key_bytes).hexdigest()
