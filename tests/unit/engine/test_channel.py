"""The engine's end of the socket: announcements are sent before the process may die."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time

from vlm_server.engine.channel import Channel
from vlm_server.protocol import (
    MESSAGE_HEADER,
    Event,
    Failed,
    OnDevice,
    decode_event,
    encode_message,
)

DYING = """
import os, signal, socket, sys
from vlm_server.protocol import OnDevice
from vlm_server.engine.channel import Channel

channel = Channel(socket.socket(fileno=int(sys.argv[1])))
for number in range(100):
    channel.send(OnDevice((str(number),)))
os.kill(os.getpid(), signal.SIGKILL)
"""


def read_all(connection: socket.socket) -> list[Event]:
    """Every event until the other end is closed."""
    events: list[Event] = []
    with connection.makefile("rb") as incoming:
        while header := incoming.read(MESSAGE_HEADER.size):
            events.append(decode_event(incoming.read(*MESSAGE_HEADER.unpack(header))))
    return events


def test_announcement_outlives_engine_killed_at_once():
    ours, theirs = socket.socketpair()
    with theirs:
        engine = subprocess.Popen(
            [sys.executable, "-c", DYING, str(theirs.fileno())], pass_fds=(theirs.fileno(),)
        )
    with ours:
        events = read_all(ours)
    assert engine.wait() == -signal.SIGKILL
    assert events == [OnDevice((str(number),)) for number in range(100)]


def test_announcement_flushes_all_earlier_events():
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    sent: list[Event] = []
    for number in range(50):
        sent += [Failed(str(number), "code", "message"), OnDevice((str(number),))]
        for event in sent[-2:]:
            channel.send(event)
    ours.setblocking(False)
    data = b"".join(map(encode_message, sent))
    assert ours.recv(len(data) + 1) == data, "something was still on its way"


def test_front_that_does_not_read_delays_engine_briefly():
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    sent: list[Event] = [Failed("a", "code", "x" * (4 << 20)), OnDevice(("a",)), OnDevice(("b",))]
    started = time.monotonic()
    for event in sent:
        channel.send(event)
    assert time.monotonic() - started < 5
    data = b"".join(map(encode_message, sent))
    with ours.makefile("rb") as incoming:
        assert incoming.read(len(data)) == data
