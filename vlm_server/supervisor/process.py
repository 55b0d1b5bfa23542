"""One engine process and the socket to it: start, send, receive, end."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping

from vlm_server.protocol import (
    MAX_MESSAGE_BYTES,
    MESSAGE_HEADER,
    Command,
    EncodedSubmit,
    Event,
    decode_event,
    encode_message,
)

logger = logging.getLogger(__name__)

_END_SECONDS = 2.0
_DEFAULTS = {"OPENBLAS_THREAD_TIMEOUT": "14"}
"""OpenBLAS's threads spin for 2**14 cycles after a product, then sleep. The default of 2**26, about
20 ms, takes cores from the front and the preparer threads."""


class EngineProcess:
    """A running engine process. It exits when our end of the socket is closed."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, environment: Mapping[str, str]) -> EngineProcess:
        """Start an engine that waits for its `Start` command; `environment` is added to ours."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "vlm_server.worker", str(theirs.fileno())),
                env={**_DEFAULTS, **os.environ, "HF_HUB_OFFLINE": "1", **environment},
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a terminal's Ctrl-C is for the front alone
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def send(self, command: Command | EncodedSubmit) -> None:
        """Send a command. Does nothing if the engine is dead: `events` ends then."""
        try:
            self._writer.write(encode_message(command))
            await self._writer.drain()
        except ConnectionError:
            logger.debug("can't send: the engine process has ended")

    async def events(self) -> AsyncIterator[Event]:
        """The engine's events, until its process ends."""
        while True:
            try:
                header = await self._reader.readexactly(MESSAGE_HEADER.size)
                (length,) = MESSAGE_HEADER.unpack(header)
                if length > MAX_MESSAGE_BYTES:
                    logger.error("the engine sent a message of %d bytes, over the limit", length)
                    return
                yield decode_event(await self._reader.readexactly(length))
            except (asyncio.IncompleteReadError, ConnectionError):
                return

    async def wait(self, seconds: float) -> bool:
        """Wait for the engine to exit; whether it did within `seconds`."""
        try:
            await asyncio.wait_for(self._process.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def end(self) -> int:
        """End the process, by force if needed. Returns its exit status, negative for a signal."""
        self._writer.close()
        if not await self.wait(_END_SECONDS):
            self._process.kill()
        return await self._process.wait()
