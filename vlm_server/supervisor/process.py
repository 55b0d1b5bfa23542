"""One engine process and the socket to it. Knows how to start, talk to and end it; no more."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping

from vlm_server.protocol import (
    FRAME_HEADER,
    MAX_FRAME_BYTES,
    Command,
    Event,
    decode_event,
    encode_frame,
)

logger = logging.getLogger(__name__)

_END_SECONDS = 2.0
_DEFAULTS = {"OPENBLAS_THREAD_TIMEOUT": "14"}
"""OpenBLAS's threads sleep 2**14 cycles after a product. By default they spin for 2**26, some
20 ms, on cores that the front and the preparers wait for."""


class EngineProcess:
    """A running engine. It ends by itself when this side of the socket is closed."""

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
        """Start an engine that waits for its `Start` command; `environment` adds to ours."""
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

    async def send(self, command: Command) -> None:
        """Send a command; a dead engine shows in `events`, not here."""
        try:
            self._writer.write(encode_frame(command))
            await self._writer.drain()
        except ConnectionError:
            logger.debug("the engine is gone")

    async def events(self) -> AsyncIterator[Event]:
        """Everything the engine says, until it ends."""
        while True:
            try:
                header = await self._reader.readexactly(FRAME_HEADER.size)
                (length,) = FRAME_HEADER.unpack(header)
                if length > MAX_FRAME_BYTES:
                    logger.error("the engine sent a frame of %d bytes", length)
                    return
                yield decode_event(await self._reader.readexactly(length))
            except (asyncio.IncompleteReadError, ConnectionError):
                return

    async def wait(self, seconds: float) -> bool:
        """Whether the engine ends by itself within `seconds`."""
        try:
            await asyncio.wait_for(self._process.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def end(self) -> int:
        """Make sure that it is gone. Returns its exit status, negative for a signal."""
        self._writer.close()
        if not await self.wait(_END_SECONDS):
            self._process.kill()
        return await self._process.wait()
