"""One engine process and the socket to it: start, send, receive, end."""

from __future__ import annotations

import asyncio
import logging
import platform
import signal
from collections import deque
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from vlm_server.platform.child import launch
from vlm_server.platform.child.passing import socket_pair
from vlm_server.protocol import (
    MAX_MESSAGE_BYTES,
    MESSAGE_HEADER,
    STACKS_SIGNAL,
    Command,
    EncodedSubmit,
    Event,
    decode_event,
    encode_message,
)

logger = logging.getLogger(__name__)

_END_SECONDS = 2.0
_SOCKET_BYTES = 4 << 20
"""The sockets' buffers: with less, a request with an image is sent in many pieces, each of which
waits until both processes have had a core."""
_STACKS_SECONDS = 0.5
"""Time for an engine to write its threads' stacks."""
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
        self._outbox: deque[Command | EncodedSubmit] = deque()
        """Commands not yet written, while the engine is slow to read."""
        self._sending: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, module: str, environment: Mapping[str, str]) -> EngineProcess:
        """Start an engine, the program `module`, which waits for its `Start` command.

        `environment` is added to ours. Raises OSError if there are too few descriptors, or no
        memory for a process.
        """
        own_socket, engine_socket = socket_pair(_SOCKET_BYTES)
        try:
            with engine_socket:
                process = await asyncio.create_subprocess_exec(
                    *launch.command(module, str(engine_socket.fileno())),
                    env={**_DEFAULTS, **launch.model_environment(), **environment},
                    cwd=launch.FOLDER,
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(engine_socket.fileno(),),
                    start_new_session=True,  # a terminal's Ctrl-C is for the front alone
                )
            reader, writer = await asyncio.open_unix_connection(sock=own_socket)
        except BaseException:
            own_socket.close()  # a process that was started ends with it
            raise
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: Command | EncodedSubmit) -> None:
        """Send a command after those before it; never waits, even if the engine does not read.

        Does nothing if the engine is dead: `events` ends then.
        """
        if self._sending is not None:
            self._outbox.append(command)
            return
        if self._writer.transport.is_closing():  # asyncio would warn of each further write
            return
        self._writer.write(encode_message(command))
        if self._writer.transport.get_write_buffer_size():
            self._sending = asyncio.create_task(self._send_rest())

    def withdraw(self, request_id: str) -> bool:
        """Remove a `Submit` that was not sent yet; returns whether there was one."""
        submit = next((c for c in self._outbox if _submits(c, request_id)), None)
        if submit is not None:
            self._outbox.remove(submit)
        return submit is not None

    async def flush(self, seconds: float) -> bool:
        """Wait until all commands are sent; returns whether they were within `seconds`."""
        if self._sending is not None:
            await asyncio.wait((self._sending,), timeout=seconds)
        return self._sending is None

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
        """Wait for the engine to exit; returns whether it did within `seconds`."""
        try:
            await asyncio.wait_for(self._process.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped the process."""
        if platform.system() == "Linux":
            return _state_on_linux(self.pid) in ("T", "t")
        ps = await asyncio.create_subprocess_exec(
            *("ps", "-o", "state=", "-p", str(self.pid)), stdout=asyncio.subprocess.PIPE
        )
        output, _ = await ps.communicate()
        return output.startswith(b"T")

    async def show_stacks(self) -> None:
        """Have the engine write its threads' stacks to standard error, which it shares with us."""
        self._signal(STACKS_SIGNAL)
        await self.wait(_STACKS_SECONDS)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    async def end(self) -> int:
        """End the process, by force if needed. Returns its exit status, negative for a signal."""
        if self._sending is not None:
            self._sending.cancel()
        self._writer.close()
        if not await self.wait(_END_SECONDS):
            self.kill()
        return await self._process.wait()

    def _signal(self, number: int) -> None:
        if self._process.returncode is None:
            self._process.send_signal(number)

    async def _send_rest(self) -> None:
        try:
            await self._writer.drain()
            while self._outbox:
                self._writer.write(encode_message(self._outbox.popleft()))
                await self._writer.drain()
        except ConnectionError:
            logger.debug("can't send: the engine process has ended")
        finally:
            self._sending = None


def _submits(command: Command | EncodedSubmit, request_id: str) -> bool:
    return isinstance(command, EncodedSubmit) and command.request_id == request_id


def _state_on_linux(pid: int) -> str:
    """The state of a process, one letter as in `ps`; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
