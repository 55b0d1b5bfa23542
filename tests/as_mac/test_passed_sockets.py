"""A socket that is passed to another process stays open here until that process has it."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.as_mac import in_flight
from tests.unit.prompt.test_grammars import byte_host
from vlm_server.errors import InternalError
from vlm_server.platform.child import passing
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.platform.child.passing import PassedSocket
from vlm_server.prompt.grammar.constraints import Schema
from vlm_server.prompt.grammar.grammar_client import CompiledGrammar, GrammarLimits
from vlm_server.prompt.grammar.grammars import Grammars

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="asks what was received; macOS itself does"),
    pytest.mark.usefixtures("flushed"),
]


@pytest.fixture
def flushed() -> Iterator[None]:
    """Sockets that are closed in flight are emptied."""
    in_flight.install()
    yield
    in_flight.remove()


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(byte_host(), GrammarLimits(60.0, 256 << 20, 60.0), 128 << 20)
    compiled(made, 0)
    yield made
    made.close()


def compiled(grammars: Grammars, constant: int) -> CompiledGrammar:
    return grammars.compile(Schema(json.dumps({"const": constant})), "", Cancellation())


def server_pid(grammars: Grammars) -> int:
    return int(grammars._server._end.peek()[2][1].pid)  # type: ignore[attr-defined]


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that is too busy to receive anything."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a socket was sent, and whoever sent it has gone on."""
    event = threading.Event()
    real = PassedSocket.wait

    def wait(self: PassedSocket, events: int, seconds: float) -> bool:
        event.set()
        return real(self, events, seconds)

    monkeypatch.setattr(PassedSocket, "wait", wait)
    return event


def test_a_schema_is_compiled_by_a_server_that_is_busy(grammars: Grammars, sent: threading.Event):
    with ThreadPoolExecutor(1) as pool:
        with stopped(server_pid(grammars)):
            sent.clear()
            grammar = pool.submit(compiled, grammars, 1)
            assert sent.wait(10)
        assert grammar.result(30).is_alive


def test_answers_are_followed_by_a_grammar_that_was_busy(grammars: Grammars):
    grammar = compiled(grammars, 12)
    with stopped(grammar.process._pid):
        (matcher,) = grammar.begin(1)
        matcher.advance([byte_host().backend.token_to_id("1")])
        assert not matcher.wait(0.05)
    assert matcher.wait(30)
    assert matcher.fault is None
    assert matcher.allowed()[byte_host().backend.token_to_id("2")]
    matcher.close()


def test_a_grammar_that_ends_before_it_takes_the_socket_ends_the_answers(grammars: Grammars):
    grammar = compiled(grammars, 1)
    pid = grammar.process._pid
    with stopped(pid):
        (matcher,) = grammar.begin(1)
        os.kill(pid, signal.SIGKILL)
    matcher.advance([byte_host().backend.token_to_id("1")])
    started = time.monotonic()
    assert matcher.wait(30)
    assert not matcher.allowed().any()
    assert time.monotonic() - started < 10


def test_a_server_that_ends_before_it_takes_the_socket_is_replaced(
    grammars: Grammars, sent: threading.Event
):
    pid = server_pid(grammars)
    with ThreadPoolExecutor(1) as pool, stopped(pid):
        sent.clear()
        failing = pool.submit(compiled, grammars, 1)
        assert sent.wait(10)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(InternalError):
            failing.result(10)
    assert compiled(grammars, 1).is_alive


@pytest.mark.parametrize("end", [0, 1])
def test_both_ends_have_room(end: int, monkeypatch: pytest.MonkeyPatch):
    """For what is on its way while the other side has no core: a mask, a picture."""
    real = socket.socketpair

    def small() -> tuple[socket.socket, socket.socket]:
        pair = real()
        for each in pair:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 10)
        return pair

    monkeypatch.setattr(socket, "socketpair", small)
    pair = passing.socket_pair(64 << 10)
    pair[end].setblocking(False)
    assert pair[end].send(bytes(48 << 10)) == 48 << 10
    for each in pair:
        each.close()


@pytest.mark.parametrize("end", [PassedSocket.close, PassedSocket.acknowledge])
def test_nothing_is_left_open(end: Callable[[PassedSocket], None]):
    here, there = socket.socketpair()
    passed = PassedSocket()
    passed.send(here, b"x")
    arriving = passing.received(there, 1)
    message, connection = next(arriving)
    assert message == b"x"
    assert passed.wait(select.POLLIN, 10)
    assert passed.connection.recv(9) == passing.ACKNOWLEDGEMENT
    end(passed)
    passed.connection.close()
    connection.settimeout(10)
    assert connection.recv(1) == b""
    here.close()
    assert list(arriving) == []
    there.close()
