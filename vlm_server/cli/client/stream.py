"""A streamed answer as it arrives."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from vlm_server.cli.client.daemon import Daemon, is_local, refusal
from vlm_server.cli.failure import CommandFailed

if TYPE_CHECKING:
    from vlm_server.cli.client.answer import Chunk

_CONNECT_SECONDS = 10.0


async def stream_chunks(daemon: Daemon, body: bytes, key: str = "") -> AsyncGenerator[Chunk, None]:
    """The chunks of the answer to a request with `"stream": true`. Raises CommandFailed.

    `key` is the conversation's, see `routing_key`.
    There is no limit on time: a long prompt may take minutes to prefill.
    """
    import httpx

    from vlm_server.cli.client.answer import ChunkReader, error_message
    from vlm_server.cli.client.chat import ChatClient

    client = ChatClient(
        daemon.url,
        api_key=daemon.api_key,
        timeout=httpx.Timeout(_CONNECT_SECONDS, read=None),
        trust_env=not is_local(daemon.url),
    )
    try:
        async with client, client.post(body, len(body), key) as response:
            if response.status != 200:
                said = b"".join([data async for _, data in response.received()])
                raise CommandFailed(refusal(response.status, said))
            reader = ChunkReader()
            async for _, data in response.received():
                for chunk in reader.feed(data):
                    if chunk.error is not None:
                        raise CommandFailed(error_message(chunk.error))
                    yield chunk
            if not reader.has_ended:
                raise CommandFailed("the answer ended before it was complete")
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise CommandFailed(f"the connection to {daemon.url} broke: {reason}") from None


async def stream_text(daemon: Daemon, body: bytes) -> AsyncGenerator[str, None]:
    """The text of the answer, in pieces. Raises CommandFailed."""
    async for chunk in stream_chunks(daemon, body):
        yield chunk.content
