"""The engine's channel to the front: messages over a socket. Knows the protocol, no engine."""

from __future__ import annotations

import logging
import os
import socket
import threading
from queue import SimpleQueue
from typing import NoReturn

from vlm_server.engine.inbox import FrontCommand, Inbox
from vlm_server.platform import log_tail
from vlm_server.platform.log_lines import PlainFormatter
from vlm_server.protocol import (
    MESSAGE_HEADER,
    Command,
    Event,
    LogLine,
    OnDevice,
    Start,
    decode_command,
    encode_message,
)

logger = logging.getLogger(__name__)

_ANNOUNCE_SECONDS = 0.1
"""The maximum wait of an announcement of work for a front that does not read."""


class LogToFront(logging.Handler):
    """Sends the front a copy of each line from level info on, without waiting."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(PlainFormatter())
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        text = log_tail.cut(self.format(record))
        self._channel.send(LogLine(record.created, record.levelno, text))


class Channel:
    """Messages over the front's socket; sending never waits long for the front to read.

    Ends the process when the front is gone, even during a message or while a model is loaded.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._incoming = connection.makefile("rb")
        self.inbox: Inbox = SimpleQueue()
        self._outbox: SimpleQueue[Event | threading.Event | None] = SimpleQueue()
        """Events to write, flags to set after all earlier events are written, None for the end."""
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    def open(self) -> Start:
        """Receive the first command; later ones go to the inbox as they arrive."""
        start = self._receive()
        assert isinstance(start, Start)
        threading.Thread(target=self._keep_reading, daemon=True).start()
        return start

    def send(self, event: Event) -> None:
        """Enqueue an event; an announcement of device work is in the socket on return."""
        self._outbox.put(event)
        if isinstance(event, OnDevice) and event != OnDevice():
            is_written = threading.Event()
            self._outbox.put(is_written)
            is_written.wait(_ANNOUNCE_SECONDS)

    def end(self, status: int) -> NoReturn:
        """End the process after all events are written, without waiting for any other thread."""
        self._outbox.put(None)
        self._writer.join()
        os._exit(status)

    def _receive(self) -> Command:
        (length,) = MESSAGE_HEADER.unpack(self._read(MESSAGE_HEADER.size))
        return decode_command(self._read(length))

    def _keep_reading(self) -> NoReturn:
        try:
            while True:
                command = self._receive()
                assert isinstance(command, FrontCommand)
                self.inbox.put(command)
        except Exception:
            logger.critical("the front can't be understood", exc_info=True)
            os._exit(1)

    def _read(self, size: int) -> bytes:
        try:
            data = self._incoming.read(size)
        except OSError:  # a front that is killed with events unread resets the socket
            os._exit(0)
        if len(data) < size:
            os._exit(0)
        return data

    def _write(self) -> None:
        try:
            while (entry := self._outbox.get()) is not None:
                if isinstance(entry, threading.Event):
                    entry.set()
                else:
                    self._connection.sendall(encode_message(entry))
        except OSError:
            os._exit(0)
        except Exception:
            logger.critical("an event can't be sent", exc_info=True)
            os._exit(1)
